"""An HTTP double of the Lease endpoint: resourceVersion conflicts, merge patch, watch."""

import asyncio
import json
from contextlib import asynccontextmanager

from aiohttp import web

PATH = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


class LeaseApi:
    """Only what the real API server promises about one kind of object."""

    def __init__(self, token):
        self.token, self.objects, self.version = token, {}, 100
        self.changed = asyncio.Condition()
        self.broken = None  # set to a status to fail every call with it

    def app(self):
        app = web.Application(middlewares=[self.guard])
        app.router.add_get(PATH, self.watch)
        app.router.add_post(PATH, self.create)
        app.router.add_get(PATH + "/{name}", self.get)
        app.router.add_patch(PATH + "/{name}", self.patch)
        return app

    @web.middleware
    async def guard(self, request, handler):
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401, text="Unauthorized")
        if self.broken:
            return web.Response(status=self.broken, text="etcdserver: request timed out")
        return await handler(request)

    async def get(self, request):
        found = self.objects.get(request.match_info["name"])
        return web.json_response(found, status=200 if found else 404)

    async def create(self, request):
        body = await request.json()
        name = body["metadata"]["name"]
        if name in self.objects:
            return web.Response(status=409, text="AlreadyExists")
        await self.publish(name, body)
        return web.json_response(body, status=201)

    async def patch(self, request):
        assert request.content_type == "application/merge-patch+json"
        change, found = await request.json(), self.objects.get(request.match_info["name"])
        if found is None:
            return web.Response(status=404, text="NotFound")
        if change["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return web.Response(status=409, text="Conflict: the object has been modified")
        merged = merge(found, change)
        await self.publish(request.match_info["name"], merged)
        return web.json_response(merged)

    async def publish(self, name, value):
        async with self.changed:
            self.version += 1
            value["metadata"]["resourceVersion"] = str(self.version)
            self.objects[name] = value
            self.changed.notify_all()

    async def watch(self, request):
        name = request.query["fieldSelector"].removeprefix("metadata.name=")
        since = int(request.query["resourceVersion"] or 0)
        answer = web.StreamResponse()
        await answer.prepare(request)
        async with self.changed:
            while self.seen_version(name) <= since:
                await self.changed.wait()
        event = {"type": "MODIFIED", "object": self.objects[name]}
        await answer.write(json.dumps(event).encode() + b"\n")
        return answer

    def seen_version(self, name):
        found = self.objects.get(name)
        return int(found["metadata"]["resourceVersion"]) if found else 0

    async def touch(self, name):
        """What `kubectl annotate` does: a new version under the leader's feet."""
        await self.publish(
            name, merge(self.objects[name], {"metadata": {"annotations": {"a": "1"}}})
        )


def merge(old, new):
    """JSON merge patch (RFC 7396)."""
    if not isinstance(new, dict):
        return new
    base = dict(old) if isinstance(old, dict) else {}
    for key, value in new.items():
        if value is None:
            base.pop(key, None)
        else:
            base[key] = merge(base.get(key), value)
    return base


@asynccontextmanager
async def lease_api(token="secret-1"):
    api = LeaseApi(token)
    runner = web.AppRunner(api.app(), shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        yield api, f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
