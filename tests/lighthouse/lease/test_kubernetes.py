"""What only the Kubernetes lease must bear. The API is an HTTP double, not a real API server."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from lighthouse.lease import LeaseUnreachable, RecordTooLarge, Timing
from lighthouse.lease.kubernetes import KubernetesLease
from lighthouse.lease.kubernetes_api import ApiServer
from tests.lighthouse.lease.kubernetes_double import lease_api


@pytest.fixture
def story(tmp_path):
    (tmp_path / "token").write_text("secret-1")

    @asynccontextmanager
    async def one_lease():
        async with lease_api() as (api, url):
            server = ApiServer(url=url, token_path=tmp_path / "token", ca_path=None)
            lease = KubernetesLease("ml", "lh", timing=Timing(ttl_s=2), server=server)
            try:
                yield api, lease
            finally:
                await lease.close()

    def run(tell):
        async def main():
            async with asyncio.timeout(60), one_lease() as (api, lease):
                await tell(api, lease, await lease.acquire("a:1"))

        asyncio.run(main())

    return run


def test_somebody_elses_annotation_costs_a_retry_and_not_the_lease(story):
    async def tell(api, lease, grant):
        for count in range(5):
            await api.touch("lh")
            grant = await lease.renew(grant)
            await api.touch("lh")
            await lease.write(grant, "job", str(count).encode())
        assert await lease.read() == {"job": b"4"}

    story(tell)


def test_kubectl_shows_the_holder_the_term_and_the_address(story):
    async def tell(api, lease, grant):
        shown = api.objects["lh"]
        assert shown["spec"]["holderIdentity"] == lease.identity
        assert (shown["spec"]["leaseTransitions"], shown["spec"]["leaseDurationSeconds"]) == (1, 2)
        assert shown["metadata"]["annotations"]["ftcore.dev/address"] == "a:1"

    story(tell)


def test_a_renewed_service_account_token_is_used_without_restart(story, tmp_path):
    async def tell(api, lease, grant):
        api.token = "secret-2"
        with pytest.raises(LeaseUnreachable, match="401"):
            await lease.renew(grant)
        (tmp_path / "token").write_text("secret-2\n")
        await lease.renew(grant)

    story(tell)


def test_an_api_server_in_trouble_is_named(story):
    async def tell(api, lease, grant):
        api.broken = 500
        with pytest.raises(LeaseUnreachable, match="Lease ml/lh: 500 etcdserver"):
            await lease.renew(grant)

    story(tell)


def test_records_that_do_not_fit_are_refused_and_the_older_ones_stay(story):
    async def tell(api, lease, grant):
        await lease.write(grant, "job", b"small")
        with pytest.raises(RecordTooLarge, match="annotations hold"):
            await lease.write(grant, "job", random.Random(1).randbytes(300_000))
        await lease.write(grant, "big", b"replica-" * 40_000)  # compresses well
        assert (await lease.read())["job"] == b"small"

    story(tell)
