"""Speak with the Kubernetes API about one Lease object, as the pod's service account."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from lighthouse.lease.errors import BadLease, LeaseUnreachable

SECRETS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
Json = dict[str, Any]


class Conflict(Exception):
    """The object changed since we read it (HTTP 409)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """Where the API is. The token file is read at each call, because Kubernetes renews it."""

    url: str
    token_path: Path = SECRETS / "token"
    ca_path: Path | None = SECRETS / "ca.crt"

    @classmethod
    def of_this_pod(cls, environ: Mapping[str, str] = os.environ) -> ApiServer:
        host = environ.get("KUBERNETES_SERVICE_HOST", "")
        if not host:
            what = "kubernetes: KUBERNETES_SERVICE_HOST is not set, so this is no pod"
            remedy = "Run the lighthouse in a pod with a service account, or use etcd: or file:."
            raise BadLease(what, remedy=remedy)
        host = f"[{host}]" if ":" in host else host
        return cls(url=f"https://{host}:{environ.get('KUBERNETES_SERVICE_PORT_HTTPS', '443')}")

    def ssl_context(self) -> ssl.SSLContext | bool:
        return ssl.create_default_context(cafile=self.ca_path) if self.ca_path else True


class LeaseObject:
    """The Lease `namespace/name` (group coordination.k8s.io, version v1)."""

    def __init__(self, server: ApiServer, namespace: str, name: str, *, timeout_s: float) -> None:
        self._server, self._namespace, self._name = server, namespace, name
        self._list = f"{server.url}/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._timeout_s = timeout_s
        self._http: aiohttp.ClientSession | None = None

    async def get(self) -> Json | None:
        """The object, or None when there is none."""
        return await self._call("GET", f"{self._list}/{self._name}", absent_is_none=True)

    async def create(self, spec: Json, annotations: Json) -> Json:
        """Raises Conflict when somebody else created it first."""
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                "annotations": annotations,
            },
            "spec": spec,
        }
        return await self._call("POST", self._list, body) or {}

    async def patch(self, version: str, spec: Json, annotations: Json) -> Json:
        """Change these fields if the object is still at `version`. Raises Conflict otherwise."""
        body = {
            "metadata": {"resourceVersion": version, "annotations": annotations},
            "spec": spec,
        }
        url = f"{self._list}/{self._name}"
        return await self._call("PATCH", url, body, kind="application/merge-patch+json") or {}

    async def wait_event(self, version: str, *, timeout_s: float) -> None:
        """Return when the object changed after `version`, or after `timeout_s`."""
        query = {
            "watch": "1",
            "fieldSelector": f"metadata.name={self._name}",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(timeout_s))),
        }
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            http = self._session()
            async with http.get(
                self._list, params=query, headers=self._headers(), timeout=limit
            ) as answer:
                await answer.content.readline()
        except TimeoutError:
            pass

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _call(
        self,
        method: str,
        url: str,
        body: Json | None = None,
        *,
        kind: str = "application/json",
        absent_is_none: bool = False,
    ) -> Json | None:
        headers = self._headers() | ({"Content-Type": kind} if body else {})
        data = json.dumps(body) if body else None
        try:
            async with self._session().request(method, url, data=data, headers=headers) as answer:
                if answer.status == 404 and absent_is_none:
                    return None
                if answer.status == 409:
                    raise Conflict(await answer.text())
                return await self._read(answer)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            what = f"the Kubernetes API at {self._server.url} did not answer: {error!r}"
            raise LeaseUnreachable(what, method=method) from error

    async def _read(self, answer: aiohttp.ClientResponse) -> Json:
        if answer.status >= 300:
            text = (await answer.text())[:200]
            where = f"Lease {self._namespace}/{self._name}"
            raise LeaseUnreachable(
                f"the Kubernetes API refused {answer.method} of {where}: {answer.status} {text}",
                status=answer.status,
            )
        content: Json = await answer.json(content_type=None)
        return content

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                connector=aiohttp.TCPConnector(ssl=self._server.ssl_context()),
            )
        return self._http

    def _headers(self) -> dict[str, str]:
        token = self._server.token_path.read_text().strip()
        return {"Authorization": f"Bearer {token}", "Accept": "application/json"}
