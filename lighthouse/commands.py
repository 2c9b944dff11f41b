"""The commands that ask a running lighthouse: status, jobs, history, config, drain, evict."""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ftcore.base.errors import FtError

Json = dict[str, Any]
SLOWNESS_SHOWN = 1.5  # below, groups differ for good reasons


class LighthouseRefused(FtError):
    remedy = (
        "Correct what the sentence names; the operator token goes into --token or LIGHTHOUSE_TOKEN."
    )


class NoLighthouse(FtError):
    remedy = (
        "Check --lighthouse HOST:PORT (or FTCORE_LIGHTHOUSE), and that `lighthouse serve` runs."
    )


class Client:
    """Asks the endpoints one after another, and follows a follower to its leader."""

    def __init__(self, endpoints: str, *, ca: str, token: str) -> None:
        self._endpoints = [e.strip() for e in endpoints.split(",") if e.strip()]
        self._token = token
        self._ca = ca
        self._context = ssl.create_default_context(cafile=ca) if ca not in ("", "system") else None

    def get(self, path: str) -> Json:
        return self._ask("GET", path, None)

    def post(self, path: str, body: Json) -> Json:
        return self._ask("POST", path, body)

    def leader_status(self) -> Json:
        """The leader's status; a follower's when no leader can be reached."""
        status = self.get("/status")
        leader = status.get("leader", "")
        if status.get("role") == "follower" and leader:
            try:
                return self._call(leader, "GET", "/status", None)
            except NoLighthouse:
                return status
        return status

    def leader_get(self, path: str) -> Json:
        status = self.get("/status")
        leader = status.get("leader", "") if status.get("role") == "follower" else ""
        return self._call(leader, "GET", path, None) if leader else self.get(path)

    def _ask(self, method: str, path: str, body: Json | None) -> Json:
        problem: FtError = NoLighthouse("no endpoint is named")
        for endpoint in self._endpoints:
            try:
                return self._call(endpoint, method, path, body)
            except NoLighthouse as error:
                problem = error
        raise problem

    def _call(self, endpoint: str, method: str, path: str, body: Json | None) -> Json:
        url = f"{self._base(endpoint)}{path}"
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10, context=self._context) as answer:
                content: Json = json.load(answer)
                return content
        except urllib.error.HTTPError as error:
            return self._refused(error, endpoint, method, path, body)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise NoLighthouse(f"{endpoint} does not answer as a lighthouse: {reason}") from error

    def _refused(
        self,
        error: urllib.error.HTTPError,
        endpoint: str,
        method: str,
        path: str,
        body: Json | None,
    ) -> Json:
        try:
            content: Json = json.loads(error.read())
        except ValueError:
            content = {"error": f"HTTP {error.code}"}
        leader = content.get("leader", "")
        if error.code == 503 and leader and leader != endpoint:
            return self._call(leader, method, path, body)
        raise LighthouseRefused(f"{endpoint}: {content.get('error')}", status=error.code)

    def _base(self, endpoint: str) -> str:
        if "://" in endpoint:
            return endpoint.rstrip("/")
        return f"{'https' if self._ca else 'http'}://{endpoint}"


def status_text(status: Mapping[str, Any], job: str | None = None) -> str:
    """What `lighthouse status` prints: one block a job, one line a group."""
    if status["role"] == "follower":
        where = f"the leader is {status['leader']}" if status["leader"] else "nobody leads yet"
        return f"this lighthouse follows; {where}"
    lines = [f"leader {status['leader']}, term {status['term']}"]
    for name, state in status["jobs"].items():
        if job in (None, name):
            lines += ["", *_job_lines(name, state)]
    torchft = status.get("torchft", {})
    if torchft.get("members") or torchft.get("asking"):
        members = ", ".join(m["replica_id"] for m in torchft["members"])
        lines += ["", f"torchft clients: quorum of {members or 'nobody'}"]
    return "\n".join(lines)


def _job_lines(name: str, state: Mapping[str, Any]) -> list[str]:
    members = len(state["members"])
    lines = [f"{name}: quorum {state['quorum']} of {members} from step {state['from_step']}"]
    if state["waiting"]:
        lines.append(f"  {state['waiting']}")
    width = max((len(g) for g in state["groups"]), default=0)
    for group, facts in state["groups"].items():
        cut = "" if facts["is_connected"] else ", stream closed"
        if facts.get("heal"):
            cut += f", {facts['heal']['says']}"
        if (slowness := facts["slowness"]) >= SLOWNESS_SHOWN:
            cut += f", {slowness:.1f} times slower than the others"
        lines.append(
            f"  {group:<{width}}  {facts['state']:<8} step {facts['committed']}, "
            f"heard {facts['heard_s_ago']:.1f} s ago{cut}"
        )
    return lines


def history_text(history: Mapping[str, Any]) -> str:
    lines = []
    for job, facts in history.items():
        for fact in facts:
            at = time.strftime("%H:%M:%S", time.localtime(fact["time"]))
            what = f"{fact['what']} {fact['about']}: {fact['detail']}"
            lines.append(f"{at} {job} {fact['quorum']} {what}")
    return "\n".join(lines) or "nothing has happened yet"


def add_commands(main: click.Group) -> None:
    """Add the commands below to `lighthouse`."""
    for command in (status, jobs, history, config, drain, evict):
        main.add_command(command)


def _connection(function: Any) -> Any:
    """The options of every command that asks."""
    options = [
        click.option(
            "--lighthouse",
            envvar="FTCORE_LIGHTHOUSE",
            default="127.0.0.1:29510",
            show_default=True,
            help="HOST:PORT, several with commas.",
        ),
        click.option("--tls-ca", envvar="FTCORE_TLS_CA", default="", help="PEM file or `system`."),
        click.option("--token", envvar="LIGHTHOUSE_TOKEN", default="", help="Operator token."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def _client(lighthouse: str, tls_ca: str, token: str) -> Client:
    if tls_ca not in ("", "system") and not Path(tls_ca).is_file():
        raise NoLighthouse(f"--tls-ca {tls_ca} is no file")
    return Client(lighthouse, ca=tls_ca, token=token)


@click.command()
@_connection
@click.option("--job", help="Only this job.")
@click.option("--watch", is_flag=True, help="Again every second until interrupted.")
def status(
    lighthouse: str, tls_ca: str, token: str, as_json: bool, job: str | None, watch: bool
) -> None:
    """Who leads, and for each job its groups and what it waits for."""
    client = _client(lighthouse, tls_ca, token)
    while True:
        answer = client.leader_status()
        text = json.dumps(answer) if as_json else status_text(answer, job)
        if watch and not as_json:
            click.clear()
        click.echo(text)
        if not watch:
            return
        time.sleep(1)


@click.command()
@_connection
def jobs(lighthouse: str, tls_ca: str, token: str, as_json: bool) -> None:
    """One line a job."""
    answer = _client(lighthouse, tls_ca, token).leader_status()["jobs"]
    if as_json:
        click.echo(json.dumps(answer))
        return
    for name, state in answer.items():
        waiting = f"; {state['waiting']}" if state["waiting"] else ""
        count, living = len(state["members"]), len(state["groups"])
        click.echo(f"{name}: quorum {state['quorum']} of {count}, {living} groups alive{waiting}")
    if not answer:
        click.echo("no jobs")


@click.command()
@_connection
@click.option("--job", help="Only this job.")
def history(lighthouse: str, tls_ca: str, token: str, as_json: bool, job: str | None) -> None:
    """What happened lately, with reasons."""
    query = f"?job={urllib.parse.quote(job, safe='')}" if job else ""
    answer = _client(lighthouse, tls_ca, token).leader_get(f"/history{query}")
    click.echo(json.dumps(answer) if as_json else history_text(answer))


@click.command()
@_connection
def config(lighthouse: str, tls_ca: str, token: str, as_json: bool) -> None:
    """The settings that the lighthouse runs with."""
    answer = _client(lighthouse, tls_ca, token).get("/config")
    lines = "\n".join(f"{name} = {value}" for name, value in answer.items())
    click.echo(json.dumps(answer) if as_json else lines)


@click.command()
@_connection
@click.argument("group")
@click.option("--job", required=True)
@click.option("--reason", default="", help="Shown in logs and history.")
def drain(
    lighthouse: str, tls_ca: str, token: str, as_json: bool, group: str, job: str, reason: str
) -> None:
    """Let GROUP finish its step and leave in good order."""
    _act(_client(lighthouse, tls_ca, token), "drain", job, group, reason, as_json)


@click.command()
@_connection
@click.argument("group")
@click.option("--job", required=True)
@click.option("--reason", default="", help="Shown in logs and history.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def evict(
    lighthouse: str,
    tls_ca: str,
    token: str,
    as_json: bool,
    group: str,
    job: str,
    reason: str,
    yes: bool,
) -> None:
    """Treat GROUP as dead. Make sure that it is: if it still trains, its work is lost."""
    client = _client(lighthouse, tls_ca, token)
    groups = client.leader_status()["jobs"].get(job, {}).get("groups", {})
    state = groups.get(group, {}).get("state", "not attached")
    if not yes:
        click.confirm(f"{group} of job {job} is {state} now. Evict it?", abort=True, err=True)
    _act(client, "evict", job, group, reason, as_json)


def _act(client: Client, what: str, job: str, group: str, reason: str, as_json: bool) -> None:
    quoted = (urllib.parse.quote(part, safe="") for part in (job, group))
    answer = client.post("/jobs/{}/groups/{}/{}".format(*quoted, what), {"reason": reason})
    click.echo(json.dumps(answer) if as_json else f"{what} of {group} in job {job} is on its way")
