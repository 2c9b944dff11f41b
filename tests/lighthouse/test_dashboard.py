"""The page in a real browser. Screenshots go to the test's directory, for people to look at."""

import asyncio
from contextlib import AsyncExitStack

from tests.lighthouse.browser import browser_page, require_chromium
from tests.lighthouse.groups import Group, Job
from tests.lighthouse.lighthouse_process import LighthouseProcess

TOKEN, OPERATOR = "t" * 16, "o" * 16
JOB = "llama <b>70b</b>"  # names come from outside: they are text, not markup


def test_the_page_follows_the_jobs_and_an_operator_can_drain(tmp_path, monkeypatch):
    require_chromium()
    (tmp_path / "tokens").write_text(f"* {TOKEN}\n@operator {OPERATOR}\n")
    monkeypatch.setenv("FTCORE_TOKEN", TOKEN)
    lighthouse = LighthouseProcess("--tokens", str(tmp_path / "tokens"))

    async def tell():
        async with asyncio.timeout(100), AsyncExitStack() as stack:
            page = await stack.enter_async_context(browser_page(tmp_path / "profile"))
            await page.look_like()
            await page.call("Page.navigate", url=f"http://{lighthouse.address}/")
            await page.until_text("No job has connected yet")
            job = Job([lighthouse.address], name=JOB)
            for name in ("a-longer-name-of-a-group", "b", "c"):
                await stack.enter_async_context(Group(job, name).alive())
            await page.until_text("quorum .* of 3 ")
            job.may_heal.clear()
            async with Group(job, "d").alive():
                await page.until_text("heals to step .* from a-longer-name.*, b, c: 30% of 1")
                await screenshots(page, tmp_path)
                job.may_heal.set()
                await page.until_text("quorum .* of 4 ")
            await page.until_text(r"member.lost\s+d: ")
            await page.until_text("last recovery: .*first step")
            assert await page.run("document.querySelectorAll('b').length") == 0
            await drain_b(page, job)
            assert not page.problems, page.problems
            lighthouse.stop()
            await page.until_text("no connection to the lighthouse")

    try:
        asyncio.run(tell())
    finally:
        lighthouse.stop()


async def screenshots(page, directory):
    """Wide and on a phone, light and dark; on a phone nothing is wider than the screen."""
    for scheme in ("light", "dark"):
        await page.look_like(scheme=scheme)
        await page.screenshot(directory / f"wide-{scheme}.png")
        await page.look_like(width=390, height=844, is_phone=True, scheme=scheme)
        await page.screenshot(directory / f"phone-{scheme}.png")
        assert await page.run("document.documentElement.scrollWidth") <= 390
    background = await page.run("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(17, 20, 23)"


CLICK_DRAIN_OF_B = """
[...document.querySelectorAll('tr')].find(r => r.cells[0].textContent === 'b')
  .querySelector('button').click()
"""


async def drain_b(page, job):
    """Refused without the token, obeyed with it."""
    await page.run("window.confirm = () => true; window.alert = text => { window.said = text }")
    await page.run(CLICK_DRAIN_OF_B)
    while not await page.run("window.said"):
        await asyncio.sleep(0.02)
    assert "operator token" in await page.run("window.said")
    page.problems.clear()  # the browser logs the refusal
    await page.run(f"document.getElementById('token').value = '{OPERATOR}'")
    await page.run(CLICK_DRAIN_OF_B)
    await job.until(lambda: job.all_in("a-longer-name-of-a-group", "c"))
