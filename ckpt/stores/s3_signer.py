"""Ask botocore for the signed URL of one S3 request: it knows credentials, regions, endpoints."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from ckpt.stores.errors import StoreDenied

VALID_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """How to reach the bucket. What is None comes from AWS_* variables and the AWS config files."""

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    key: str | None = None
    secret: str | None = None
    token: str | None = None
    addressing_style: str = "auto"  # auto: path style for an endpoint of one's own


class Signer:
    """Signed URLs with today's credentials; safe to use from many threads.

    botocore renews credentials that it can renew (roles, SSO, web identity) before they expire.
    `renew()` reads them anew from environment and files when a server says they have expired.
    """

    def __init__(self, options: S3Options) -> None:
        self.options = options
        self._lock = threading.Lock()
        self._client = _client(options)

    def url(self, operation: str, **parameters: Any) -> str:
        """Source: AWS Signature Version 4, query parameters; the payload is not signed."""
        try:
            signed: str = self._client.generate_presigned_url(
                operation, Params=parameters, ExpiresIn=VALID_S
            )
        except BotoCoreError as error:
            raise StoreDenied(
                f"cannot sign a request to bucket {parameters.get('Bucket')}: {error}",
                remedy="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role.",
            ) from error
        return signed

    def renew(self) -> None:
        with self._lock:
            self._client = _client(self.options)

    def move_to(self, region: str) -> None:
        """The bucket turned out to be in another region."""
        with self._lock:
            self.options = replace(self.options, region=region)
            self._client = _client(self.options)


def _client(options: S3Options) -> Any:
    style = options.addressing_style
    if style == "auto" and options.endpoint_url:
        style = "path"
    session = botocore.session.Session(profile=options.profile)
    return session.create_client(
        "s3",
        endpoint_url=options.endpoint_url,
        region_name=options.region or session.get_config_variable("region") or "us-east-1",
        aws_access_key_id=options.key,
        aws_secret_access_key=options.secret,
        aws_session_token=options.token,
        config=Config(signature_version="s3v4", s3={"addressing_style": style}),
    )
