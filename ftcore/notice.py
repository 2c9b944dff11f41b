"""Decide from what a machine says of itself whether it is about to be taken away.

Pure: settings and answers in, a reason out. `departure.py` asks and listens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ftcore.base.errors import BadSetting


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """This machine goes at `ends_at`, by the monotonic clock."""

    reason: str
    ends_at: float

    def left_s(self, now: float) -> float:
        return max(0.0, self.ends_at - now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """Where a cloud says that it takes an instance away, and how to read its answer.

    read: (HTTP status, body) to the reason, or an empty string. notice_s: how long before.
    token_url: where a token for the question is fetched first (AWS, IMDSv2).
    """

    base: str
    path: str
    read: Callable[[int, str], str]
    notice_s: float
    headers: Mapping[str, str] = field(default_factory=dict)
    token_path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """From where notice is taken that this group will be stopped. It then leaves in good order.

    sigterm: SIGTERM is a notice, unless the program has a handler of its own before the manager is
        made. Further ones are ignored until `notice_s` is over; then the process ends by it.
    file: a notice as soon as it exists; its first line is the reason.
    cloud: "aws", "gcp" or "azure": ask the metadata server of this machine every `poll_s`.
    metadata_url: that server, when it is not at the cloud's usual address.
    notice_s: seconds from the notice to the end. Default: 30, and 120 on AWS.
    """

    sigterm: bool = True
    file: Path | str | None = None
    cloud: str | None = None
    metadata_url: str = ""
    poll_s: float = 2.0
    notice_s: float | None = None

    def __post_init__(self) -> None:
        """Raises BadSetting."""
        if self.cloud is not None and self.cloud not in CLOUDS:
            raise BadSetting(f"preemption cloud is {self.cloud!r}, not one of {', '.join(CLOUDS)}")
        if self.metadata_url and self.cloud is None:
            raise BadSetting(
                f"metadata_url is {self.metadata_url}, but no cloud is named",
                remedy="Pass cloud='aws', 'gcp' or 'azure' too: their answers differ.",
            )
        for name in ("poll_s", "notice_s"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise BadSetting(f"preemption {name} is {seconds}, not above zero")

    def ends_at(self, now: float) -> float:
        usual_s = CLOUDS[self.cloud].notice_s if self.cloud else NOTICE_S
        return now + (usual_s if self.notice_s is None else self.notice_s)


ON_SIGTERM = Preemption()
NOTICE_S = 30.0  # Kubernetes and Slurm's KillWait both give 30 s


def _read_aws(status: int, body: str) -> str:
    """The spot instance-action: 404 until there is one. docs.aws.amazon.com/AWSEC2, Spot
    instance interruption notices."""
    if status != 200:
        return ""
    answer = _object(body)
    action = answer.get("action")
    return f"AWS will {action} this instance at {answer.get('time')}" if action else ""


def _read_gcp(status: int, body: str) -> str:
    """cloud.google.com/compute/docs/instances/preemptible: TRUE or FALSE."""
    is_preempted = status == 200 and body.strip().upper() == "TRUE"
    return "GCP preempts this instance" if is_preempted else ""


def _read_azure(status: int, body: str) -> str:
    """Scheduled events; a Freeze or a Reboot keeps the machine. learn.microsoft.com/azure."""
    events = _object(body).get("Events") if status == 200 else None
    for each in events if isinstance(events, list) else ():
        if isinstance(each, dict) and each.get("EventType") in ("Preempt", "Terminate", "Redeploy"):
            return f"Azure announces {each['EventType']}, not before {each.get('NotBefore')}"
    return ""


def _object(body: str) -> Mapping[str, object]:
    try:
        answer = json.loads(body)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


CLOUDS: Mapping[str, Cloud] = {
    "aws": Cloud(
        base="http://169.254.169.254",
        path="/latest/meta-data/spot/instance-action",
        token_path="/latest/api/token",
        read=_read_aws,
        notice_s=120.0,
    ),
    "gcp": Cloud(
        base="http://metadata.google.internal",
        path="/computeMetadata/v1/instance/preempted",
        headers={"Metadata-Flavor": "Google"},
        read=_read_gcp,
        notice_s=NOTICE_S,
    ),
    "azure": Cloud(
        base="http://169.254.169.254",
        path="/metadata/scheduledevents?api-version=2020-07-01",
        headers={"Metadata": "true"},
        read=_read_azure,
        notice_s=NOTICE_S,
    ),
}
