"""What people and Prometheus ask over HTTP, and what an operator may do with the right token."""

from __future__ import annotations

import asyncio
import html
import ipaddress
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from lighthouse.host import Host
from lighthouse.host_status import host_config, host_status, torchft_status
from lighthouse.metrics import LighthouseCollector
from lighthouse.security import bearer
from lighthouse.server import Lighthouse
from lighthouse.status import JsonDict

PAGE = Path(__file__).with_name("dashboard.html")
EVENTS_EVERY_S = 0.5
WATCHERS_MAX = 100
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Pages:
    """The handlers of one lighthouse."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._registry = CollectorRegistry()
        self._registry.register(LighthouseCollector(host))
        self._watchers = 0
        self._text, self._text_at = "", 0.0

    async def page(self, _: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": PAGE_POLICY, "X-Content-Type-Options": "nosniff"}
        return web.Response(text=PAGE.read_text(), content_type="text/html", headers=headers)

    async def healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(self, _: web.Request) -> web.Response:
        """200 when managers can come here: it leads, or can say who does."""
        ready = self._host.lighthouse is not None or self._host.holder is not None
        return web.Response(
            status=200 if ready else 503, text="ready\n" if ready else "no lighthouse leads\n"
        )

    async def leaderz(self, _: web.Request) -> web.Response:
        """200 on the leader only, for load balancers that must not use a follower."""
        leads = self._host.lighthouse is not None
        return web.Response(
            status=200 if leads else 503, text="leader\n" if leads else "follower\n"
        )

    async def status(self, request: web.Request) -> web.Response:
        """JSON; for a browser, and so for torchft's own page, a table of torchft's groups."""
        if "text/html" in request.headers.get("Accept", ""):
            return web.Response(text=torchft_table(self._host), content_type="text/html")
        return web.json_response(host_status(self._host))

    async def history(self, request: web.Request) -> web.Response:
        lighthouse = self._host.lighthouse
        wanted = request.query.get("job")
        jobs = lighthouse.jobs if lighthouse else {}
        return web.json_response(
            {name: job.history() for name, job in jobs.items() if wanted in (None, name)}
        )

    async def interruptions(self, _: web.Request) -> web.Response:
        """Each time that training stopped, as a record with its phases and its cost."""
        lighthouse = self._host.lighthouse
        jobs = lighthouse.jobs if lighthouse else {}
        return web.json_response({name: job.interruptions() for name, job in jobs.items()})

    async def config(self, _: web.Request) -> web.Response:
        return web.json_response(host_config(self._host))

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), content_type="text/plain")

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: the whole status, each time it changed."""
        if self._watchers >= WATCHERS_MAX:
            raise web.HTTPServiceUnavailable(text=f"{WATCHERS_MAX} pages are watching already\n")
        answer = web.StreamResponse(headers={"Cache-Control": "no-store"})
        answer.content_type = "text/event-stream"
        await answer.prepare(request)
        self._watchers += 1
        try:
            await self._send_changes(answer)
        except ConnectionError:
            pass  # the page was closed
        finally:
            self._watchers -= 1
        return answer

    async def _send_changes(self, answer: web.StreamResponse) -> None:
        sent = ""
        while True:
            if (text := self._newest_text()) != sent:
                sent = text
                await answer.write(f"data: {text}\n\n".encode())
            await asyncio.sleep(EVENTS_EVERY_S)

    def _newest_text(self) -> str:
        """Made once for all who watch."""
        now = time.monotonic()
        if now - self._text_at > EVENTS_EVERY_S / 2:
            self._text = json.dumps(host_status(self._host, with_history=True), sort_keys=True)
            self._text_at = now
        return self._text

    # What changes something

    async def drain(self, request: web.Request) -> web.Response:
        return await self._act(request, "drain")

    async def evict(self, request: web.Request) -> web.Response:
        return await self._act(request, "evict")

    async def _act(self, request: web.Request, what: str) -> web.Response:
        self._require_operator(request)
        lighthouse = self._require_leader()
        job = lighthouse.jobs.get(request.match_info["job"])
        group = request.match_info["group"]
        if job is None or not job.knows(group):
            raise _problem(404, f"job {request.match_info['job']!r} has no replica group {group!r}")
        reason = (await _body(request)).get("reason") or f"{what} by an operator"
        (job.drain if what == "drain" else job.evict)(group, str(reason)[:500])
        return web.json_response({"done": what, "group": group})

    async def kill(self, request: web.Request) -> web.Response:
        """torchft's button: ask a group's manager to exit."""
        self._require_operator(request)
        self._require_leader()
        problem = await self._host.torchft.kill(
            request.match_info["group"], "killed from dashboard"
        )
        if problem:
            raise _problem(404, problem)
        return web.Response(text="killed\n")

    def _require_operator(self, request: web.Request) -> None:
        tokens = self._host.tokens
        if tokens is None:
            if not (_is_local(request.remote) and _is_same_origin(request)):
                raise _problem(403, "without --tokens only this machine may change anything")
        elif not tokens.is_operator(bearer(request.headers.get("Authorization", ""))):
            raise _problem(401, "this needs the operator token of the token file")

    def _require_leader(self) -> Lighthouse:
        if self._host.lighthouse is None:
            holder = self._host.holder
            where = f"the leader is {holder.address}" if holder else "no lighthouse leads"
            raise _problem(503, where, leader=holder.address if holder else "")
        return self._host.lighthouse


def _problem(status: int, what: str, **more: object) -> web.HTTPException:
    kinds: dict[int, type[web.HTTPException]] = {
        401: web.HTTPUnauthorized,
        403: web.HTTPForbidden,
        404: web.HTTPNotFound,
        503: web.HTTPServiceUnavailable,
    }
    text = json.dumps({"error": what, **more})
    return kinds[status](text=text, content_type="application/json")


async def _body(request: web.Request) -> JsonDict:
    try:
        content = await request.json() if request.can_read_body else {}
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _is_local(remote: str | None) -> bool:
    try:
        return ipaddress.ip_address(remote or "").is_loopback
    except ValueError:
        return False


def _is_same_origin(request: web.Request) -> bool:
    """Another site's page in the operator's browser must not act for him."""
    origin = request.headers.get("Origin")
    return origin is None or origin.partition("://")[2] == request.host


def torchft_table(host: Host) -> str:
    state = torchft_status(host)
    rows = [
        f"<tr><td>{html.escape(g['replica_id'])}</td><td>{g['step']}</td>"
        f"<td>{html.escape(g['address'])}</td></tr>"
        for g in state["members"]
    ]
    head = "<tr><th>replica_id</th><th>step</th><th>manager</th></tr>"
    return f"<h2>torchft quorum {state['quorum_id']}</h2><table>{head}{''.join(rows)}</table>"


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(host: Host) -> web.Application:
    pages = Pages(host)
    app = web.Application(client_max_size=64 * 1024)
    gets: dict[str, Handler] = {
        "/": pages.page,
        "/healthz": pages.healthz,
        "/readyz": pages.readyz,
        "/leaderz": pages.leaderz,
        "/status": pages.status,
        "/history": pages.history,
        "/interruptions": pages.interruptions,
        "/config": pages.config,
        "/metrics": pages.metrics,
        "/events": pages.events,
    }
    posts: dict[str, Handler] = {
        "/jobs/{job}/groups/{group}/drain": pages.drain,
        "/jobs/{job}/groups/{group}/evict": pages.evict,
        "/replica/{group}/kill": pages.kill,
    }
    app.add_routes([web.get(path, handler) for path, handler in gets.items()])
    app.add_routes([web.post(path, handler) for path, handler in posts.items()])
    return app
