import pytest

from lighthouse.lease import BadLease, Timing, parse_lease
from lighthouse.lease.etcd import EtcdLease
from lighthouse.lease.file import FileLease
from lighthouse.lease.kubernetes import KubernetesLease
from lighthouse.lease.kubernetes_api import ApiServer
from lighthouse.lease.memory import MemoryLease


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("memory", MemoryLease),
        ("file:/tmp/x", FileLease),
        ("etcd:a:2379,b:2379,c:2379", EtcdLease),
        ("etcd:https://a.example:2379,[::1]:2379/team/lighthouse", EtcdLease),
    ],
)
def test_each_kind_is_named_by_its_prefix(text, kind):
    assert isinstance(parse_lease(text), kind)


def test_kubernetes_needs_a_pod(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(BadLease, match="no pod"):
        parse_lease("kubernetes:ml/lighthouse")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert isinstance(parse_lease("kubernetes:ml/lighthouse"), KubernetesLease)
    assert (
        ApiServer.of_this_pod({"KUBERNETES_SERVICE_HOST": "fd00::1"}).url == "https://[fd00::1]:443"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no kind of lease"),
        ("redis:h:1", "'redis' is no kind of lease"),
        ("memory:x", "takes no argument"),
        ("file:", "name a directory"),
        ("file:/etc/passwd", "name a directory"),
        ("etcd:", "'' is not HOST:PORT"),
        ("etcd:a:2379,b", "'b' is not HOST:PORT"),
        ("etcd:a:99999", "is not HOST:PORT"),
        ("kubernetes:ml", "'' is no valid name"),
        ("kubernetes:ML/x", "'ML' is no valid namespace"),
    ],
)
def test_a_wrong_lease_is_refused_with_what_is_wrong(text, why):
    with pytest.raises(BadLease, match=why):
        parse_lease(text)


@pytest.mark.parametrize(("text", "ttl_s"), [("memory", 0.5), ("etcd:a:1", 1.5)])
def test_a_lease_time_that_the_store_cannot_keep_is_refused(text, ttl_s):
    with pytest.raises(BadLease, match="--lease-ttl"):
        parse_lease(text, timing=Timing(ttl_s=ttl_s))
