"""Rules of the repository that no module can hold by itself."""
import ast
import configparser
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted((ROOT / "nbs").glob("[0-9][0-9]_*.ipynb"))
EXPERIMENTS = sorted((ROOT / "nbs/experiments").glob("*.ipynb"))
HEAVY = {"torch", "pandas", "matplotlib", "seaborn", "einops", "transformers", "IPython", "nbconvert", "papermill"}


def tracked() -> list[Path]:
    "Files git knows or would add; in a copy without git, every file outside hidden folders."
    run = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True)
    return [ROOT / f for f in run.stdout.decode().split("\0") if f and (ROOT / f).is_file()]


def cells(notebook: Path) -> list[dict]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def exported_as(notebook: Path) -> str:
    found = [m[1] for c in cells(notebook) if (m := re.search(r"^#\| *default_exp +(\S+)", "".join(c["source"]), re.M))]
    assert len(found) == 1, f"{notebook.name}: needs one default_exp, has {found}"
    return found[0]


def imports(module: Path) -> dict[str, int]:
    "Modules of shohin that a module imports, anywhere in it, and the line."
    found = {}
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.level == 1 or (node.module or "").split(".")[0] == "shohin"):
            name = (node.module or "") if node.level else (node.module or "").partition(".")[2]
            for target in [name] if name else [a.name for a in node.names]:
                found[target.split(".")[0]] = node.lineno
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1]: node.lineno for a in node.names if a.name.startswith("shohin.")}
    return found


def test_both_nbdev_configurations_agree():
    ini = configparser.ConfigParser()
    ini.read(ROOT / "settings.ini")
    old, new = ini["DEFAULT"], tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["nbdev"]
    assert set(new) == {"nbs_path", "lib_path", "tst_flags", "allowed_cell_metadata_keys"}
    for key, value in new.items():
        assert (value if isinstance(value, str) else " ".join(value)) == old[key], key
    # nbdev 3 would put an address into every docstring if one of these were set
    assert not old["doc_host"] and not old["git_url"]


def test_version_has_one_source():
    ini = configparser.ConfigParser()
    ini.read(ROOT / "settings.ini")
    assert f'__version__ = "{ini["DEFAULT"]["version"]}"' in (ROOT / "shohin/__init__.py").read_text()


def test_every_notebook_has_its_module_and_every_module_its_notebook():
    names = {nb.name[3:-6]: exported_as(nb) for nb in LESSONS}
    assert all(number == module for number, module in names.items()), names
    modules = {p.stem for p in (ROOT / "shohin").glob("*.py")} - {"__init__", "_modidx"}
    assert modules == set(names), f"without a partner: {modules ^ set(names)}"


def test_modules_import_only_those_above_them():
    rank = {exported_as(nb): i for i, nb in enumerate(LESSONS)}
    wrong = [f"shohin/{name}.py:{line} imports {other}, which comes after it"
             for name in rank for other, line in imports(ROOT / f"shohin/{name}.py").items() if rank.get(other, 99) >= rank[name]]
    assert not wrong, "\n".join(wrong)


def test_plain_modules_and_the_command_line_start_without_torch():
    plain = [exported_as(nb) for nb in LESSONS if nb.name[0] in "03" or nb.stem.endswith("cli")]
    code = f"import sys; {'; '.join(f'import shohin.{m}' for m in plain)}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "", f"imported by {plain}"


@pytest.mark.parametrize("notebook", EXPERIMENTS, ids=lambda p: p.stem)
def test_experiment_has_one_parameters_cell(notebook):
    tagged = [c for c in cells(notebook) if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1, "nbdev_clean strips the tag unless settings.ini allows it; papermill then runs the defaults"
    for line in filter(str.strip, "".join(tagged[0]["source"]).splitlines()):
        assert re.match(r"\w+ *: *[\w\[\], .|]+ *= *.+#.+", line), f"not `name: type = value  # comment`: {line}"
    assert not any(re.search(r"^#\| *export", "".join(c["source"]), re.M) for c in cells(notebook)), "experiments export nothing"


def test_experiments_are_left_to_papermill():
    assert (ROOT / "nbs/experiments/.notest").exists(), "nbdev_test would train every experiment"


@pytest.mark.parametrize("notebook", LESSONS, ids=lambda p: p.stem)
def test_lesson_reads_as_a_lesson(notebook):
    first = "".join(cells(notebook)[0]["source"])
    assert re.match(r"# \w.*\n\n> \S", first), "the first cell must be `# name` and a `> summary`"
    for i, c in enumerate(cells(notebook)):
        assert not any(o["output_type"] == "error" for o in c.get("outputs", [])), f"cell {i} was committed with an error"


def test_readme_begins_with_the_two_commands():
    lines = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if not line.startswith("```")]
    assert [line.split("#")[0].strip() for line in lines[:2]] == ["make reproduce", "make test"]


def test_readme_is_made_from_the_index_notebook():
    run = subprocess.run([sys.executable, "scripts/readme.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_nothing_large_is_committed():
    big = [f"{p.relative_to(ROOT)}: {p.stat().st_size:,} bytes" for p in tracked() if p.stat().st_size > 1_000_000]
    assert not big, "\n".join(big)
    assert sum(p.stat().st_size for p in tracked() if (ROOT / "reports") in p.parents) < 10_000_000, "reports/ is over 10 MB"


def test_no_path_of_a_machine_and_no_package_index():
    path = re.compile(rb"(?<![\w.])/(?:home|root|Users|work|mnt)/[\w.-]+|/tmp/(?!bash)[\w.-]*/[\w.-]+")
    index = re.compile(rb"https?://[\w.-]*(?:pypi\.|pythonhosted|whl\.pytorch|download\.pytorch|npmjs)[\w./-]*")
    wrong = []
    for p in tracked():
        data = p.read_bytes()
        if p == Path(__file__) or b"\0" in data[:8000]: continue
        wrong += [f"{p.relative_to(ROOT)}: {m[0].decode()}" for pattern in (path, index) for m in pattern.finditer(data)]
    assert not wrong, "\n".join(wrong[:20])


def test_constraints_pin_everything_and_name_no_address():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            assert re.fullmatch(r"[\w.\-\[\]]+==[\w.+!]+( *;.*)?", line.strip()), line
