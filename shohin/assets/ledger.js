// The ledger's filter. Without it the whole table is there; nothing is fetched or stored.
const $ = id => document.getElementById("filter" + id);
const rows = [...document.querySelectorAll(".ledger tbody tr")];
function apply() {
  const text = $("-text").value.trim().toLowerCase(), source = $("-source").value, verdict = $("-verdict").value;
  for (const r of rows)
    r.hidden = !!(source && r.dataset.source !== source || verdict && r.dataset.verdict !== verdict || !r.textContent.toLowerCase().includes(text));
  const n = rows.filter(r => !r.hidden).length;
  $("-count").textContent = n === rows.length ? `${n} claims` : `${n} of ${rows.length} claims`;
}
$("").hidden = false;
$("").addEventListener("input", apply);
$("").addEventListener("submit", e => e.preventDefault());
apply();
