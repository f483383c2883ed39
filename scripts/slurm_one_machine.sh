#!/usr/bin/env bash
# A Slurm cluster of one node, this machine, to try jobs on: real queue, real arrays, no real cards.
#
#   eval "$(scripts/slurm_one_machine.sh start)"     starts it (or finds it running) and sets SLURM_CONF
#   scripts/slurm_one_machine.sh stop                ends it and what runs in it
#
# Needs the Debian packages slurm-wlm and munge, and root; no systemd. Everything it writes is in SLURM_HOME. It
# listens on 127.0.0.1 only. Nothing in /etc is touched: who wants to talk to it needs SLURM_CONF.
set -euo pipefail

home=${SLURM_HOME:-/tmp/slurm-one-machine}
name=$(hostname -s)
conf=$home/slurm.conf
port=${SLURM_PORT:-16817}          # and the one after it; not Slurm's own, so that it can stand beside a real node
socket=$home/munge/socket          # a munge of its own, with a key of its own

fail() { echo "slurm_one_machine: $*" >&2; exit 1; }

running() {  # running PIDFILE PROGRAM: is it our daemon, still?
  local pid
  pid=$(cat "$1" 2>/dev/null) && [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$2" ]
}

configure() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '$1 == "MemTotal:" { print int($2 / 1024 * 0.9) }' /proc/meminfo)
  mkdir -p "$home"/state "$home"/spool "$home"/log
  # no cgroups (a container may not have them), no accounting; jobs start within a second; those in urgent preempt those in debug
  cat >"$conf" <<EOF
ClusterName=one-machine
AuthType=auth/munge
AuthInfo=socket=$socket
SlurmUser=root
SlurmdUser=root
SlurmctldHost=$name(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$home/state
SlurmdSpoolDir=$home/spool
SlurmctldPidFile=$home/slurmctld.pid
SlurmdPidFile=$home/slurmd.pid
SlurmctldLogFile=$home/log/slurmctld.log
SlurmdLogFile=$home/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=1024
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=3
MinJobAge=300
GresTypes=gpu
NodeName=$name NodeAddr=127.0.0.1 CPUs=$cores RealMemory=$memory Gres=gpu:1 State=UNKNOWN
PartitionName=debug Nodes=$name Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=$name MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
EOF
  # a card that is none: with a count and no device file the node would be invalid
  echo 'Name=gpu File=/dev/null' >"$home/gres.conf"
  echo 'CgroupAutomount=no' >"$home/cgroup.conf"
}

start_munge() {
  if [ ! -s "$home/munge/key" ]; then
    install -d -o munge -g munge -m 755 "$home/munge"
    head -c 128 /dev/urandom >"$home/munge/key"
    chown munge:munge "$home/munge/key"
    chmod 400 "$home/munge/key"
  fi
  running "$home/munge/pid" munged && return 0
  rm -f "$socket"
  runuser -u munge -- "$(command -v munged)" --key-file="$home/munge/key" --socket="$socket" --pid-file="$home/munge/pid" \
    --log-file="$home/munge/log" --seed-file="$home/munge/seed" || fail "munged does not start: see $home/munge/log"
}

start() {
  [ "$(id -u)" = 0 ] || fail "needs root"
  PATH=$PATH:/usr/sbin
  command -v slurmctld slurmd munged >/dev/null || fail "no Slurm here: apt-get install -y --no-install-recommends slurm-wlm munge"
  chmod 755 "$(mkdir -p "$home" && echo "$home")"
  [ -s "$conf" ] && running "$home/slurmctld.pid" slurmctld || configure
  start_munge >&2
  export SLURM_CONF=$conf
  running "$home/slurmctld.pid" slurmctld || slurmctld -f "$conf" >&2 || fail "slurmctld does not start: see $home/log/slurmctld.log"
  running "$home/slurmd.pid" slurmd || slurmd -f "$conf" -N "$name" >&2 || fail "slurmd does not start: see $home/log/slurmd.log"
  for _ in $(seq 60); do
    if sinfo -h -o %T 2>/dev/null | grep -qE 'idle|mixed|allocated'; then echo "export SLURM_CONF=$conf"; return 0; fi
    sleep 0.5
  done
  fail "the node does not come up: see $home/log"
}

stop() {
  local file pid
  if [ -s "$conf" ]; then
    SLURM_CONF=$conf timeout 20 scancel --partition=debug,urgent 2>/dev/null || true
    for _ in $(seq 20); do [ -z "$(SLURM_CONF=$conf timeout 10 squeue -h 2>/dev/null)" ] && break; sleep 0.5; done
  fi
  for file in slurmd:slurmd.pid slurmctld:slurmctld.pid munged:munge/pid; do
    running "$home/${file#*:}" "${file%%:*}" || continue
    pid=$(cat "$home/${file#*:}")
    kill "$pid"
    for _ in $(seq 40); do kill -0 "$pid" 2>/dev/null || break; sleep 0.25; done
    ! kill -0 "$pid" 2>/dev/null || kill -9 "$pid"
  done
  rm -rf "$home"
}

case ${1:-} in
  start) start ;;
  stop) stop ;;
  *) fail "usage: $0 start | stop" ;;
esac
