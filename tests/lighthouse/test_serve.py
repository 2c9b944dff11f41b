"""`lighthouse serve` as its users meet it: security, operators, the command line, metrics."""

import asyncio
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from lighthouse.__main__ import main
from tests.lighthouse.certificates import Authority
from tests.lighthouse.groups import Group, Job

ROOT = Path(__file__).parents[2]
TOKEN, OTHER, OPERATOR = "t" * 16, "u" * 16, "o" * 16


def story(tell):
    async def main():
        async with asyncio.timeout(60), AsyncExitStack() as stack:
            await tell(stack)

    asyncio.run(main())


def cli(*arguments):
    """Runs in a process: the test's event loop goes on meanwhile."""
    command = [sys.executable, "-m", "lighthouse", *arguments]
    return asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True)


def post(address, path, **headers):
    request = urllib.request.Request(f"http://{address}{path}", b"{}", headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


async def trains(stack, lighthouse, names="ab", **more):
    job = Job([lighthouse.address], **more)
    for name in names:
        await stack.enter_async_context(Group(job, name).alive())
    await job.until(lambda: job.all_in(*names))
    return job


def test_a_group_without_its_jobs_token_tries_again_and_takes_a_rotated_one(
    lighthouses, tmp_path, monkeypatch
):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"job {OTHER}\n")
    lighthouse = lighthouses("--tokens", str(tokens))
    monkeypatch.setenv("FTCORE_TOKEN", TOKEN)

    async def tell(stack):
        job = Job([lighthouse.address])
        group = await stack.enter_async_context(Group(job, "a").alive())
        await job.until(lambda: "not good for job 'job'" in group.uplink._failure)
        assert group.refused is None
        tokens.write_text(f"job {OTHER}\njob {TOKEN}\n")
        await job.until(lambda: job.all_in("a"))

    story(tell)


def test_a_token_that_stays_wrong_stops_the_group_with_a_sentence(
    lighthouses, tmp_path, monkeypatch
):
    (tmp_path / "tokens").write_text(f"job {OTHER}\n")
    lighthouse = lighthouses("--tokens", str(tmp_path / "tokens"))
    monkeypatch.setenv("FTCORE_TOKEN", TOKEN)

    async def tell(stack):
        job = Job([lighthouse.address])
        group = Group(job, "a")
        group.uplink.token_patience_s = 0.2
        await stack.enter_async_context(group.alive())
        await job.until(lambda: group.refused)
        assert group.refused.what == "the token is not good for job 'job', for 0.2 s"
        assert "FTCORE_TOKEN_FILE" in group.refused.remedy

    story(tell)


def test_rotating_a_token_cuts_no_group_that_is_attached(lighthouses, tmp_path, monkeypatch):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"job {TOKEN}\n")
    lighthouse = lighthouses("--tokens", str(tokens))
    monkeypatch.setenv("FTCORE_TOKEN", TOKEN)

    async def tell(stack):
        job = await trains(stack, lighthouse)
        tokens.write_text(f"job {OTHER}\n")
        await job.steps(20)
        assert [g.attached_to for g in job.groups.values()] == [1, 1]

    story(tell)


def test_with_mutual_tls_groups_train_and_strangers_get_nothing(lighthouses, tmp_path, monkeypatch):
    authority = Authority(tmp_path)
    (cert, key), (client_cert, client_key) = authority.issue("server"), authority.issue("client")
    options = ["--tls-cert", cert, "--tls-key", key, "--tls-client-ca", authority.ca]
    lighthouse = lighthouses(*map(str, options))
    monkeypatch.setenv("FTCORE_TLS_CA", str(authority.ca))

    async def tell(stack):
        stranger = Job([lighthouse.address])
        async with Group(stranger, "x").alive() as group:
            while "no answer" in group.uplink._failure:
                await asyncio.sleep(0.01)
            assert not group.uplink.attached.is_set()
        monkeypatch.setenv("FTCORE_TLS_CERT", str(client_cert))
        monkeypatch.setenv("FTCORE_TLS_KEY", str(client_key))
        await trains(stack, lighthouse)

    story(tell)


def test_only_the_operator_drains_and_evicts(lighthouses, tmp_path, monkeypatch):
    (tmp_path / "tokens").write_text(f"job {TOKEN}\n@operator {OPERATOR}\n")
    lighthouse = lighthouses("--tokens", str(tmp_path / "tokens"))
    monkeypatch.setenv("FTCORE_TOKEN", TOKEN)

    async def tell(stack):
        job = await trains(stack, lighthouse, "abc")
        path = "/jobs/job/groups/a/evict"
        assert await asyncio.to_thread(post, lighthouse.address, path) == 401
        stranger = {"Authorization": f"Bearer {TOKEN}"}
        assert await asyncio.to_thread(post, lighthouse.address, path, **stranger) == 401
        where = ("--lighthouse", lighthouse.address, "--job", "job", "--token", OPERATOR)
        done = await cli("drain", "c", *where)
        assert done.stdout == "drain of c in job job is on its way\n"
        await job.until(lambda: job.all_in("a", "b"))
        missing = await cli("evict", "z", *where, "--yes")
        assert missing.returncode == 1
        assert "job 'job' has no replica group 'z'" in missing.stderr
        assert "Traceback" not in missing.stderr

    story(tell)


def test_another_sites_page_cannot_act_through_the_operators_browser(lighthouses):
    lighthouse = lighthouses()
    path = "/jobs/job/groups/a/evict"
    assert post(lighthouse.address, path, Origin="http://evil.example") == 403
    assert post(lighthouse.address, path, Origin=f"http://{lighthouse.address}") == 404


def test_status_says_in_a_sentence_what_a_job_waits_for(lighthouses):
    lighthouse = lighthouses("--min-replicas", "3")

    async def tell(stack):
        job = Job([lighthouse.address])
        for name in "ab":
            await stack.enter_async_context(Group(job, name).alive())
        while (
            "only 2 asked"
            not in (said := await cli("status", "--lighthouse", lighthouse.address)).stdout
        ):
            assert said.returncode == 0
        assert "waiting for 3 replica groups: only 2 asked (a, b)" in said.stdout
        lines = (await cli("jobs", "--lighthouse", lighthouse.address)).stdout
        assert lines.startswith("job: quorum none of 0, 2 groups alive; waiting for 3")
        answer = await cli("status", "--json", "--lighthouse", lighthouse.address)
        assert set(json.loads(answer.stdout)["jobs"]["job"]["groups"]) == {"a", "b"}

    story(tell)


def test_history_and_config_can_be_read(lighthouses):
    lighthouse = lighthouses("--heartbeat-timeout", "1.5")

    async def tell(stack):
        await trains(stack, lighthouse)
        history = await cli("history", "--job", "job", "--lighthouse", lighthouse.address)
        assert "quorum.issued quorum: a, b" in history.stdout
        config = await cli("config", "--lighthouse", lighthouse.address)
        assert "heartbeat_timeout_s = 1.5\n" in config.stdout

    story(tell)


def test_a_lighthouse_that_is_not_there_is_named_with_a_remedy():
    result = CliRunner().invoke(main, ["status", "--lighthouse", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "127.0.0.1:1 does not answer" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--bind", "0.0.0.0:0"], "plain text on 0.0.0.0"),
        (["--bind", "nonsense"], "'nonsense' is not HOST:PORT"),
        (["--lease", "zoo:1"], "'zoo' is no kind of lease"),
        (["--lease", "file:x", "--journal", "y"], "the lease keeps the quorums itself"),
        (["--tls-cert", "x.pem"], "a certificate needs its key"),
        (["--min-replicas", "0"], "--min-replicas 0 is not above zero"),
        (["--min-replicas", "5", "--max-replicas", "4"], "--max-replicas 4 is below"),
        (["--tokens", "/nowhere"], "No such file"),
    ],
)
def test_options_that_cannot_work_are_refused_in_one_sentence(options, why):
    result = CliRunner().invoke(main, ["serve", *options])
    assert result.exit_code == 1
    assert why in result.stderr
    assert "Traceback" not in result.output


def table_of_the_readme():
    """Each metric of the README's table, with its labels."""
    text = (ROOT / "lighthouse" / "README.md").read_text()
    rows = re.findall(r"^\| (`ft_lighthouse_.*?) \| (.*?) \| ?(.*?) ?\|$", text, re.MULTILINE)
    for names, _, labels in rows:
        for name in re.findall(r"`(\w+)`", names):
            yield name, {label.strip() for label in labels.split(",") if label.strip()}


def exposition(text):
    """Each metric of /metrics, with its labels."""
    for family in text_string_to_metric_families(text):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        yield family.name + ("_total" if family.type == "counter" else ""), labels


def test_metrics_are_those_of_the_readmes_table_no_more_and_no_less(lighthouses):
    lighthouse = lighthouses()

    async def tell(stack):
        job = await trains(stack, lighthouse)
        async with Group(job, "c").alive():
            await job.until(lambda: job.all_in(*"abc"))
        await job.until(lambda: job.all_in(*"ab"))
        await job.steps(2)
        while 'recovery_seconds_count{job="job",phase="first_step"} 1.0' not in (
            text := await asyncio.to_thread(lighthouse.get, "/metrics")
        ):
            await asyncio.sleep(0.05)
        told, written = dict(exposition(text)), dict(table_of_the_readme())
        assert set(told) == set(written)
        for name, labels in told.items():
            assert labels <= written[name], name
        assert "ft_lighthouse_leader 1.0" in text

    story(tell)


def test_torchfts_own_page_paths_are_there(lighthouses):
    lighthouse = lighthouses()
    request = urllib.request.Request(f"http://{lighthouse.address}/status")
    request.add_header("Accept", "text/html")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert "torchft quorum" in answer.read().decode()
    assert post(lighthouse.address, "/replica/nobody:1/kill") == 404
