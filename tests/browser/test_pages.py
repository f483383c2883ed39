"""The pages in Chromium: nothing is fetched, nothing overflows, axe finds nothing, keyboard and filter work.

Run on the sample of tests/report_sample.py (with the pages of `shohin diagnose --html` and `replay --html`), on the committed
reports, and on SHOHIN_SITE if that is set.
"""
import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import report_sample

from shohin.diagnose import diagnose, replay_log
from shohin.report import build_site

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[2]
SITES = ["sample", *(["reports"] if (ROOT / "reports/index.html").exists() else []), *([os.environ["SHOHIN_SITE"]] if "SHOHIN_SITE" in os.environ else [])]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright
    if not CHROMIUM: pytest.fail("no Chromium here: install chromium and a font (Debian: chromium fonts-dejavu-core)")
    with sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # no sandbox: CI runs as root
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    build_site([report_sample.run(folder)], folder / "results", folder / "site")
    log = report_sample.broken_log(folder)
    d = diagnose(log)
    (folder / "site/diagnosis.html").write_text(d.to_html())
    (folder / "site/replay.html").write_text(replay_log(d.log, diagnosis=d).to_html())
    return folder / "site"


@pytest.fixture(params=SITES, ids=lambda s: Path(s).name)
def site(request, sample): return {"sample": sample, "reports": ROOT / "reports"}.get(request.param, Path(request.param))


@pytest.fixture
def visit(browser):
    "visit(file, scheme=, width=, **context) -> page, which at the end must have asked for nothing and complained of nothing."
    contexts, asked, said = [], [], []
    def go(path, scheme="light", width=1280, **context):
        contexts.append(browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}, **context))
        page = contexts[-1].new_page()
        page.on("request", lambda r: asked.append(r.url) if not r.url.startswith("data:") else None)
        page.on("console", lambda m: said.append(m.text))
        page.on("pageerror", lambda e: said.append(str(e)))
        page.goto(path.resolve().as_uri())
        return page
    yield go
    assert [u for u in asked if not (u.startswith("file:") and u.split("#")[0].endswith((".html", ".json")))] == []
    assert said == []
    for c in contexts: c.close()


def files(site): return sorted(site.glob("*.html"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(site, visit, scheme):
    from axe_playwright_python.sync_playwright import Axe
    for path in files(site):
        page = visit(path, scheme, 390 if scheme == "dark" else 1280)
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        found = Axe().run(page, options=RULES).response
        assert len(found["passes"]) > 15, "axe did not look"
        assert {v["id"]: [n["html"][:200] for n in v["nodes"][:3]] for v in found["violations"]} == {}, path.name


def test_axe_would_find_something(sample, visit):
    from axe_playwright_python.sync_playwright import Axe
    page = visit(sample / "sample.html")
    page.evaluate("document.querySelector('img').removeAttribute('alt'); document.querySelector('.lead').style.color = '#ccc'")
    assert {v["id"] for v in Axe().run(page, options=RULES).response["violations"]} >= {"image-alt", "color-contrast"}


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_overflows(site, visit, width):
    for path in files(site):
        page = visit(path, width=width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path.name
        page.evaluate("document.documentElement.style.fontSize = '200%'")  # a reader who needs large type
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{path.name} at twice the type size"


def test_type_is_readable_and_images_are_drawn(site, visit):
    for path in files(site):
        page = visit(path, width=390)
        assert page.evaluate("parseFloat(getComputedStyle(document.querySelector('main p')).fontSize)") >= 16
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        for image in page.locator("img").all():
            assert image.evaluate("i => i.complete && i.naturalWidth > 0") and image.get_attribute("alt")
            assert image.bounding_box()["width"] > 300


def test_pages_follow_the_readers_scheme(site, visit):
    for path in files(site):
        light, dark = (visit(path, s).evaluate("getComputedStyle(document.body).backgroundColor") for s in ("light", "dark"))
        assert light != dark
        for image in visit(path, "dark").locator("figure img").all():
            assert image.evaluate("i => getComputedStyle(i).backgroundColor") == "rgb(255, 255, 255)"


def test_keyboard_reaches_everything(site, visit):
    for path in files(site):
        page = visit(path)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        assert page.locator(".skip").bounding_box()["x"] >= 0, "the skip link shows when it has the focus"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        expected = page.evaluate("[...document.querySelectorAll('main a, main summary, main select, main input')].filter(e => e.checkVisibility()).length")
        reached = set()
        for _ in range(3 * expected + 60):
            page.keyboard.press("Tab")
            at = page.evaluate("""() => { const e = document.activeElement; if (!e || e === document.body) return null;
                const s = getComputedStyle(e), all = [...document.querySelectorAll('*')];
                return [all.indexOf(e), e.matches('main a, main summary, main select, main input'), s.outlineStyle !== 'none'] }""")
            if at is None: break
            assert at[2], "focus is not visible"
            if at[1]: reached.add(at[0])
        assert len(reached) == expected, path.name


def test_folded_code_opens_with_the_keyboard(sample, visit):
    page = visit(sample / "sample.html")
    summary = page.locator("details.code > summary").first
    assert not page.locator("details.code pre").first.is_visible()
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("details.code pre").first.is_visible()


def test_ledger_filters(site, visit):
    page = visit(site / "index.html")
    rows = page.locator(".ledger tbody tr")
    total, shown = rows.count(), lambda: page.locator(".ledger tbody tr:visible")
    assert shown().count() == total > 0 and page.locator("#filter-count").inner_text() == f"{total} claims"
    verdict, source = rows.first.get_attribute("data-verdict"), rows.first.get_attribute("data-source")
    page.select_option("#filter-verdict", verdict)
    page.select_option("#filter-source", source)
    expected = page.locator(f"tr[data-verdict={verdict}][data-source={source}]").count()
    assert shown().count() == expected
    assert page.locator("#filter-count").inner_text() == (f"{expected} of {total} claims" if expected != total else f"{total} claims")
    page.fill("#filter-text", "no claim says this")
    assert shown().count() == 0
    page.fill("#filter-text", "")
    page.select_option("#filter-verdict", "")
    page.select_option("#filter-source", "")
    assert shown().count() == total
    page.locator("#filter-text").press("Enter")  # does not submit or leave the page
    assert page.url.endswith("index.html")


def test_ledger_is_whole_without_scripts(site, visit):
    page = visit(site / "index.html", java_script_enabled=False)
    assert page.locator(".ledger tbody tr:visible").count() == page.locator(".ledger tbody tr").count() > 0
    assert not page.locator("#filter").is_visible()


def test_links_open_the_claim_they_name(site, visit):
    page = visit(site / "index.html")
    link = page.locator(".ledger .where a").first
    target = link.get_attribute("href").partition("#")[2]
    link.click()
    assert page.url.endswith(f"#{target}") and page.locator(f"#{target}").is_visible()


def test_hostile_text_runs_nothing(sample, visit):
    for path in files(sample):
        page = visit(path)
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert page.evaluate("window.pwned") is None


def test_content_policy_stops_what_would_slip_through(sample, browser, tmp_path):
    "Even markup that got onto a page runs nothing and fetches nothing."
    bad = "<script>window.pwned = 1</script><img src='https://example.com/x.png' onerror='window.pwned = 2'><style>@import 'https://example.com/x.css'</style>"
    for path in files(sample):
        (tmp_path / path.name).write_text(path.read_text().replace("</main>", bad + "</main>"))
        page = browser.new_page()
        blocked, fetched = [], []
        page.on("requestfailed", lambda r, blocked=blocked: blocked.append(r.failure))
        page.on("response", lambda r, fetched=fetched: fetched.append(r.url))
        page.goto((tmp_path / path.name).as_uri())
        assert page.evaluate("window.pwned") is None
        assert [u for u in fetched if u.startswith("http")] == []
        assert blocked == ["csp", "csp"]  # the image and the style sheet never left the browser
        page.close()
