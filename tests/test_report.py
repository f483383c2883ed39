"""Pages say what their results say, refuse what must not be published, and let no text become markup."""
import copy
import json
import math
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import bs4
import matplotlib
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
import report_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from shohin import report
from shohin.report import build_site, check_pages, interval, number
from shohin.reproduce import GUIDES
from shohin.shards import UserError

matplotlib.use("agg")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    "The sample, executed and made into a site once."
    folder = tmp_path_factory.mktemp("report")
    build_site([report_sample.run(folder)], folder / "results", folder / "site")
    return folder


@pytest.fixture
def site(built, tmp_path):
    "A copy that a test may spoil."
    shutil.copytree(built, tmp_path / "copy")
    return tmp_path / "copy/site"


def page(folder, name="sample"): return bs4.BeautifulSoup((folder / f"site/{name}.html").read_text(), "html.parser")


# what is on a page

def test_page_has_one_title_and_unique_anchors(built):
    for name in ("sample", "index", "bench-sample"):
        soup = page(built, name)
        assert len(soup("h1")) == 1
        ids = [e["id"] for e in soup.find_all(id=True)]
        assert len(ids) == len(set(ids))
        targets = [a["href"] for a in soup("a") if a["href"].startswith("#")]
        assert targets and {t[1:] for t in targets} <= set(ids)
    assert [a.text for a in page(built).select(".toc a")] == ["Loss by step", "What was found", "Loss by step", "Claims", "How this page was made"]


def test_links_between_pages_lead_somewhere(built):
    for name in ("sample", "index", "bench-sample"):
        for a in page(built, name)("a"):
            file, _, anchor = a["href"].partition("#")
            assert not file or (built / "site" / file).exists(), a
            if file and anchor: assert page(built, file[:-5]).find(id=anchor), a


def test_parameters_hidden_cells_and_progress_are_left_out(built):
    text = page(built).get_text()
    for gone in ("a secret parameter", "seed = 7", "import json, sys", "hidden print", "show_claims", "#|", "progress\n", "\x1b"):
        assert gone not in text, gone
    assert page(built).select_one("details.code > summary").text == "Draw the loss"
    assert page(built).select("details.printed pre")[0].text.count("\n") > 25  # thirty lines of output are folded


def test_hostile_text_stays_text(built):
    for name in ("sample", "index", "bench-sample"):
        soup = page(built, name)
        assert len(soup("script")) == (name == "index")  # the ledger's own
        assert not [e for e in soup(True) if any(a.startswith("on") for a in e.attrs)]
        assert all(i["src"].startswith("data:image/svg+xml,") and i["alt"] for i in soup("img"))
        assert "window.pwned = 1" in soup.get_text()
    assert not page(built).find(id="foreign"), "HTML that no function of ours made"
    assert page(built).find("strong", string="bold")


def test_content_policy_allows_only_the_ledgers_script(built):
    for name in ("sample", "index", "bench-sample"):
        policy = page(built, name).find("meta", {"http-equiv": "Content-Security-Policy"})["content"]
        assert policy.startswith("default-src 'none'")
        assert ("script-src 'none'" in policy) == (name != "index")


def test_figure_carries_alt_caption_size_and_numbers(built):
    figure = page(built).find("figure")
    assert figure.img["alt"] == "Loss jumps to 3.0 at step 40." and (figure.img["width"], figure.img["height"]) == ("557", "480")
    assert figure.figcaption.text.startswith("Read: </pre>")
    assert figure.find_next_sibling("details")["class"] == ["numbers"]


def test_claims_the_notebook_does_not_show_are_added(built):
    shown = [a["id"] for a in page(built).select("article.claim")]
    assert shown == ["claim-pinned", "claim-wrecked", "claim-release", "claim-leads", "claim-shards"]


def test_every_claim_is_in_the_ledger_with_numbers_and_interval(built):
    rows = page(built, "index").select(".ledger tbody tr")
    assert [(r["data-source"], r["data-verdict"]) for r in rows] == [(c["source"], c["verdict"]) for c in report_sample.result()["claims"]]
    text = rows[0].get_text(" ", strip=True)
    assert "jump ratio: 2.05 times" in text and "each seed: 0.930, 0.950, 0.910" in text and "after 1 earlier version" in text and "0.880 to 0.980" in text


def test_labels_tell_how_much_to_trust():
    one = report_sample.result(seeds=[1]) | {"profile": "smoke", "dirty": True}
    text = bs4.BeautifulSoup(report._index([one], {"sample": ("", "")}), "html.parser").get_text()
    assert "one seed" in text and "its numbers mean nothing" in text and "uncommitted changes" in text
    assert "3 seeds" not in text


# page and results agree

def test_a_sound_site_has_no_problems(built): assert check_pages(built / "site") == []


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("file, old, new, problem", [
    ("results/sample.json", '"verdict": "reproduced"', '"verdict": "contradicted"', "says reproduced for sample:claims.pinned.verdict"),
    ("results/sample.json", "2.0519", "2.06", "says 2.05 for sample:claims.pinned.evidence.mean"),
    ("results/sample.json", "812.4", "812.5", "was made from other results"),
    ("results/sample.json", '"id": "pinned"', '"id": "other"', "no results file has"),
    ("sample.html", ">3.01</data>", ">3.02</data>", "says 3.02 for sample:arms.guard 2.0x.final_loss"),
    ("sample.html", 'value="3.01"', 'value="3.011"', "says 3.01"),
    ("index.html", ">contradicted</data>", ">reproduced</data>", "says reproduced for sample:claims.wrecked.verdict"),
    ("index.html", 'data-json="sample:claims.leads.verdict"', 'data-json="sample:claims.leads.evidence.n"', "lacks the claim leads"),
    ("sample.html", "<h1>", "<h1>x</h1><h1>", "has 2 h1"),
    ("sample.html", "</main>", '<img src="https://example.com/x.png"></main>', "would load https://example.com/x.png"),
    ("benchmarks/sample.json", "0.03912", "0.0392", "bench-sample.html: says 0.0391 for bench-sample:tables.0.rows.0.s"),
    ("benchmarks/sample.json", "0.123456", "0.2", "bench-sample.html: was made from other results"),
    ("benchmarks/sample.json", '"exact": true, ', '', "bench-sample.html: cites bench-sample:tables.0.rows.0.exact, which no results file has"),
    ("bench-sample.html", ">12,346</data>", ">12,345</data>", "says 12,345"),
    ("bench-sample.html", 'data-json="bench-sample:tables.0.rows.2.loader"', 'data-json="bench-sample:tables.0.rows.2.note"', "lacks tables.0.rows.2.loader"),
    ("index.html", 'href="bench-sample.html"', 'href="sample.html"', "lacks the benchmark sample"),
])
def test_a_page_that_disagrees_is_found(site, file, old, new, problem):
    edit(site / file, old, new)
    assert any(problem in p for p in check_pages(site)), check_pages(site)


def test_pages_and_results_come_in_pairs(site):
    shutil.copy(site / "results/sample.json", site / "results/alone.json")
    assert "alone.json: has no page" in check_pages(site)
    (site / "results/sample.json").unlink()
    assert "sample.html: has no results file" in check_pages(site)
    (site / "bench-sample.html").unlink()
    assert "benchmarks/sample.json: has no page: make pages" in check_pages(site)
    shutil.copy(site / "sample.html", site / "bench-other.html")
    assert "bench-other.html: has no results file" in check_pages(site)
    (site / "index.html").unlink()
    assert "index.html: is missing" in check_pages(site)


def test_committed_reports_agree_with_their_results():
    if not (ROOT / "reports/index.html").exists(): pytest.skip("no reports yet")
    assert check_pages(ROOT / "reports") == []


# benchmarks

def test_a_benchmarks_page_shows_all_that_its_file_says(built):
    soup, r = page(built, "bench-sample"), report_sample.benchmark()
    assert [h.text for h in soup("h2")] == ["In short", "Seconds", "Seconds", "Notes", "How this page was made"]
    assert [a["href"] for a in soup.select(".toc a")] == ["#seconds", "#seconds-2", "#notes", "#made"]
    first, wide, plain = soup("table")
    assert [th.text for th in first.select("thead th")] == ["loader", "seconds", "exact", "note"]
    assert [[c.get_text() for c in tr.find_all(["th", "td"])] for tr in first.select("tbody tr")][::2] == [["ours", "0.0391", "yes", ""], ["peer", "–", "–", "skipped: does not install"]]
    assert ["num" in c.get("class", []) for c in first.select("thead th")] == [False, True, True, False]
    assert len(wide.select("thead th")) == 12 and [c.get_text() for c in plain.select("tbody tr > *")] == ["x", "1, 2.50"]
    text = soup.get_text()
    assert all(s in text for s in ("The first paragraph.", "The machine was idle.", "d7e420a9f0 with uncommitted changes", "Ours is 2.4 times as fast.", r["command"])) and "0.123" not in text
    assert "".join(x.text for x in page(built, "index").select("article.experiment")[-1]("h3")) == r["title"]


def test_an_index_without_benchmarks_does_not_speak_of_them():
    text = report._index([report_sample.result()], {"sample": ("", "")})
    assert "enchmark" not in text


@pytest.mark.parametrize("spoil, words", [
    (lambda r: r.pop("commit"), "lacks commit"), (lambda r: r.update(tables=[]), "lacks tables"), (lambda r: r["tables"][1].pop("caption"), "table 1 lacks caption"),
    (lambda r: r["tables"][0].update(rows=[]), "table 0 lacks rows"), (lambda r: r.update(benchmark="other"), "must be named like it"), (lambda r: r["tables"].append("x"), "table 3 is not"),
    (lambda r: r["tables"][0]["rows"].append([1, 2]), "table 0: a row is not"), (lambda r: r["tables"][0]["rows"][0].update(seconds=float("nan")), "not JSON"), (None, "not JSON"), ([], "not a JSON object")])
def test_a_bad_benchmark_is_one_line_and_nothing_is_written(tmp_path, spoil, words):
    (tmp_path / "benchmarks").mkdir()
    r = report_sample.benchmark()
    if callable(spoil): spoil(r)
    (tmp_path / "benchmarks/sample.json").write_text("{" if spoil is None else json.dumps(spoil if spoil == [] else r))
    with pytest.raises(UserError, match=words): build_site([], tmp_path, tmp_path)
    assert not list(tmp_path.glob("*.html"))


# building

def test_building_again_changes_no_byte_and_keeps_other_pages(built, tmp_path):
    out = tmp_path / "site"
    shutil.copytree(built / "site", out)
    before = {p.name: p.read_bytes() for p in out.rglob("*.*")}
    build_site([built / "sample.ipynb"], built / "results", out)
    assert {p.name: p.read_bytes() for p in out.rglob("*.*")} == before
    (tmp_path / "fresh").mkdir()
    build_site([], tmp_path / "fresh", out)  # nothing new: the page that is there stays in the index
    assert {p.name: p.read_bytes() for p in out.rglob("*.*")} == before


def spoil_error(nb): nb.cells[-2].outputs.append(nbformat.v4.new_output("error", ename="ValueError", evalue="x", traceback=[]))
def spoil_status(nb): nb.cells[-2].metadata.papermill.status = "pending"
def spoil_exception(nb): nb.metadata.papermill.exception = True
def spoil_end(nb): nb.cells[-2].update(outputs=[], execution_count=None)     # papermill can call a cell completed that never ran
def spoil_title(nb): nb.cells[0].source = "No title"
def spoil_alt(nb):
    for o in (o for c in nb.cells if c.cell_type == "code" for o in c.outputs if "image/svg+xml" in o.get("data", {})): o.metadata["image/svg+xml"]["alt"] = ""


@pytest.mark.parametrize("spoil, words", [(spoil_error, "failed with ValueError"), (spoil_status, "is pending"), (spoil_exception, "papermill stopped"), (spoil_end, "does not end with the claims"),
                                          (spoil_title, "first cell must be"), (spoil_alt, "no alt text")], ids=lambda x: getattr(x, "__name__", ""))
def test_unfinished_notebooks_are_refused_and_nothing_is_written(built, tmp_path, spoil, words):
    nb = nbformat.read(built / "sample.ipynb", as_version=4)
    spoil(nb)
    nbformat.write(nb, tmp_path / "sample.ipynb")
    with pytest.raises(UserError, match=words): build_site([tmp_path / "sample.ipynb"], built / "results", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text, words", [(None, "no results file"), ("{", "not JSON"), ("{}", "lacks experiment")])
def test_bad_results_are_refused(built, tmp_path, text, words):
    if text is not None: (tmp_path / "sample.json").write_text(text)
    with pytest.raises(UserError, match=words): build_site([built / "sample.ipynb"], tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_notebook_is_one_line(tmp_path):
    with pytest.raises(UserError, match="run the experiment first"): build_site([tmp_path / "no.ipynb"], tmp_path, tmp_path / "out")


def test_numbers_of_another_run_are_refused(built, tmp_path):
    "The notebook shows the claims of its own run; a results file of a later run must not be put under it."
    other = copy.deepcopy(report_sample.result())
    other["claims"][0]["evidence"]["mean"] = 1.0
    (tmp_path / "sample.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match=r"is of another run"): build_site([built / "sample.ipynb"], tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# guides

def test_a_guide_is_a_page_of_text(built, tmp_path):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(s) for s in ("# How to\n\n> In short.", "## One & two\n\n```sh\nls -l\n```", "## One & two\n\n<b>ours</b>")])
    nbformat.write(nb, tmp_path / "how.ipynb")
    site = tmp_path / "site"
    shutil.copytree(built / "site", site)
    build_site([], tmp_path, site, guides=[tmp_path / "how.ipynb"])
    soup = page(tmp_path, "how")
    assert [soup.h1.text, soup.select_one(".lead").text] == ["How to", "In short."] and [a["href"] for a in soup.select(".toc a")] == ["#one-two", "#one-two-2"]
    assert soup.pre["tabindex"] == "0" and "ls" in soup.pre.text
    assert "how.html" in [a.get("href") for a in page(tmp_path, "index")("a")] and check_pages(site) == []
    before = (site / "how.html").read_bytes()
    build_site([], tmp_path, site)                  # not given again, it stays
    assert (site / "how.html").read_bytes() == before and check_pages(site) == []
    (site / "index.html").write_text((site / "index.html").read_text().replace('href="how.html"', 'href="no.html"'))
    assert check_pages(site) == ["index.html: lacks the guide how"]
    nb.cells.append(nbformat.v4.new_code_cell("1"))
    nbformat.write(nb, tmp_path / "how.ipynb")
    with pytest.raises(UserError, match="text cells only"): build_site([], tmp_path, site, guides=[tmp_path / "how.ipynb"])


@pytest.mark.parametrize("guide", GUIDES)
def test_the_committed_guide_is_what_its_notebook_says(guide):
    assert (ROOT / f"reports/{Path(guide).stem}.html").read_text() == report._guide(ROOT / guide), "make pages"


# numbers

def test_t_interval_covers_what_it_says():
    rng = np.random.default_rng(0)
    hits = np.mean([(i := interval(rng.normal(size=3))).low <= 0 <= i.high for _ in range(4000)])
    assert abs(hits - 0.95) < 0.012
    assert interval([1.0, 2.0, 3.0], 0.5).high < interval([1.0, 2.0, 3.0], 0.99).high


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.floats(), st.integers(), st.none(), st.booleans(), st.text(), st.lists(st.floats(), max_size=3)))
def test_every_value_can_be_written(x): assert isinstance(number(x), str) and (number(x) or x == "")


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-4, 1e6, exclude_max=True), st.sampled_from([1, -1]))
def test_a_written_number_is_the_value_to_three_digits(x, sign):
    assert float(number(sign * x).replace(",", "").replace("−", "-")) == pytest.approx(sign * x, rel=0.006)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=3000))
def test_thinning_loses_no_extreme(ys):
    x, y = report.thin(range(len(ys)), ys, points=50)
    assert len(y) <= max(50, len(ys) if len(ys) <= 50 else 0) and y.max() == max(ys) and y.min() == min(ys)
    assert (np.diff(x) > 0).all() and all(ys[int(a)] == b for a, b in zip(x, y, strict=True))


# markup and figures

@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.sampled_from("<>&\"'/=abscript !-{}%#"), max_size=60))
def test_no_text_becomes_markup(text):
    r = report_sample.result()
    r["claims"] = [r["claims"][0] | {"quote": text, "prediction": text, "evidence": {text or "k": text}}]
    for markup in (report._table([{"a": text, "b": 1.0}], text)[0], report._render("claims.html.j2", result=r, claims=r["claims"])):
        tags = {e.name for e in bs4.BeautifulSoup(str(markup), "html.parser")(True)}
        assert tags <= {"div", "table", "caption", "thead", "tbody", "tr", "th", "td", "article", "h3", "span", "data", "blockquote", "p", "footer",
                        "dl", "dt", "dd", "ul", "li", "code"}


def test_figures_are_equal_in_every_process():
    code = ("import matplotlib.pyplot as plt, hashlib\nfrom shohin.report import _svg, style\nstyle(); fig, ax = plt.subplots()\n"
            "ax.plot([1, 2, 3], label='loss'); ax.legend(); ax.fill_between([0, 1], 1); print(hashlib.sha256(_svg(fig).encode()).hexdigest())")
    made = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": s, "MPLBACKEND": "agg", "HOME": "/nonexistent"}).stdout
            for s in ("1", "2")}
    assert len(made) == 1


def test_the_slim_figure_draws_the_same():
    "Every mark of the figure as matplotlib wrote it, in its order, with all that its groups, style and classes say of it."
    def marks(svg):
        tree = ET.fromstring(svg); css = dict(re.findall(r"\.(s\d+)\{([^}]*)\}", "".join(e.text for e in tree.iter() if e.tag.endswith("}style"))))
        def walk(e, said):
            said = [*said, *(f"{k}={v}" for k, v in e.attrib.items() if k not in ("id", "class", "d")), *([f"style={css[e.get('class')]}"] if "class" in e.attrib else [])]
            if e.tag.endswith(("path", "use", "rect")): yield e.tag, e.get("d"), sorted(said)
            for c in e: yield from walk(c, said)
        return list(walk(tree, []))
    report.style()
    fig, axes = plt.subplots(1, 2, sharey=True)
    for ax in axes: ax.semilogy(np.arange(90), np.exp(np.sin(np.arange(90))), "o--", label="loss"); ax.legend(); ax.text(3, 1, "a < b & c")
    with pytest.MonkeyPatch.context() as m: m.setattr(report, "_slim", lambda svg: svg); plain = report._svg(fig)
    slim = report._slim(plain)
    assert len(slim) < .8 * len(plain) and len(marks(plain)) > 100 and marks(slim) == marks(plain)
    plt.close(fig)


def test_a_long_log_stays_small_and_keeps_its_spike():
    log = [{"step": s, "loss": 2 + np.sin(s / 9) / 9 + 7 * (s == 5151), "domains": {"code_python": 12}} for s in range(20_000)]
    report.style()
    fig, ax = plt.subplots()
    report.plot_loss(ax, log)
    assert len(report._svg(fig)) < 60_000
    assert max(line.get_ydata().max() for line in ax.get_lines()) == log[5151]["loss"]
    plt.close(fig)


def test_every_skipped_step_is_marked():
    log = [{"step": s, "loss": 1.0, "domains": {"math": 12}, "decision": "skip:loss" if s % 7 == 0 else "apply"} for s in range(700)]
    fig, ax = plt.subplots()
    report.plot_loss(ax, log)
    marks = next(line for line in ax.get_lines() if line.get_label() == "skipped")
    assert list(marks.get_xdata()) == list(range(0, 700, 7))
    plt.close(fig)


def test_a_figure_too_large_for_svg_becomes_a_png(monkeypatch):
    import IPython.display
    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **kw: shown.append((data, kw["metadata"])))
    fig, ax = plt.subplots()
    ax.plot(np.random.default_rng(0).normal(size=3000))
    report.show_figure(fig, alt="noise", caption="c", max_bytes=1000)
    assert re.match(r"[A-Za-z0-9+/]+=*$", shown[0][0]["image/png"]) and shown[0][1]["image/png"]["alt"] == "noise"


def test_the_jump_has_the_colour_of_what_is_read_there():
    log = [{"step": s, "loss": 1.0 if s < 50 else 3.0, "domains": {"code_python": 12} if s < 50 else {"math": 12}} for s in range(100)]
    fig, ax = plt.subplots()
    report.plot_loss(ax, log)
    code, new = ax.get_lines()
    assert code.get_color() == report.DOMAIN_COLORS["code_python"] and max(code.get_xdata()) == 49 and max(code.get_ydata()) == 1
    assert new.get_color() == report.DOMAIN_COLORS["math"] and min(new.get_xdata()) == 49 and [line.get_label() for line in (code, new)] == ["code python", "math"]
    plt.close(fig)


@pytest.mark.parametrize("df", [1, 2, 3, 5, 6, 9, 40])
def test_t_distribution_is_the_integral_of_its_density(df):
    t = report.t_quantile(0.95, df)
    x = np.linspace(-t, t, 200_001)
    density = (1 + x * x / df) ** (-(df + 1) / 2) * math.gamma((df + 1) / 2) / math.sqrt(df * math.pi) / math.gamma(df / 2)
    assert np.trapezoid(density, x) == pytest.approx(0.95, abs=1e-6)


def test_links_between_the_published_pages_lead_somewhere():
    site = Path(__file__).resolve().parents[1] / "reports"
    broken = [f"{page.name}: {link}" for page in site.glob("*.html") for link in set(re.findall(r'href="([^"#:]+)', page.read_text(encoding="utf-8"))) if not link.startswith("data") and not (site / link).exists()]
    assert not broken, broken


def test_code_has_spans_for_what_is_coloured_and_no_others():
    import re

    from shohin.report import ASSETS, COLOURED, _highlight
    rules = [r.split("{")[0] for r in re.findall(r"[^{}]+\{[^}]*\}", (ASSETS / "style.css").read_text()) if "var(--soft)" in r or "var(--string)" in r or "var(--keyword)" in r or "var(--number)" in r]
    short = {c for r in rules for c in re.findall(r"\.([a-z][a-z0-9]?)\b(?!-)", r)}
    assert set(COLOURED.split("|")) <= short
    html = str(_highlight("def f(x):\n    return x < 1  # one & only\n"))
    assert set(re.findall(r'class="(\w+)"', html)) == {"k", "mi", "c1"} and "x &lt; " in html and re.sub(r"</?span[^>]*>", "", html).count("<") == 0
