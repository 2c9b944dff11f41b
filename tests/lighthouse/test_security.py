import os

import pytest

from ftcore.base.errors import BadSetting
from lighthouse.security import (
    BadTokenFile,
    PlainTextRefused,
    TokenFile,
    bearer,
    parse_tokens,
    require_safe_bind,
    tls_context,
)

A, B, C = "a" * 16, "b" * 16, "c" * 16


@pytest.fixture
def token_path(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"# tokens\nllama {A}\nllama {B}\n\n@operator {C}\n")
    return path


def test_a_token_is_good_for_its_job_only(token_path):
    tokens = TokenFile.open(token_path)
    assert tokens.allows("llama", A) and tokens.allows("llama", B)
    assert not tokens.allows("other", A)
    assert not tokens.allows("llama", "")
    assert not tokens.allows("llama", C)


def test_only_the_operator_is_the_operator(token_path):
    tokens = TokenFile.open(token_path)
    assert tokens.is_operator(C)
    assert not tokens.is_operator(A)
    assert not tokens.allows("@operator", C)


def test_a_star_token_is_good_for_every_job(token_path):
    token_path.write_text(f"* {A}\n")
    assert TokenFile.open(token_path).allows("anything", A)


def test_a_rotated_file_is_read_without_restart(token_path):
    tokens = TokenFile.open(token_path)
    replacement = token_path.with_suffix(".new")
    replacement.write_text(f"llama {'d' * 16}\n")
    os.replace(replacement, token_path)
    assert tokens.allows("llama", "d" * 16)
    assert not tokens.allows("llama", A)


def test_a_file_broken_while_running_leaves_the_last_good_tokens_and_a_problem(token_path):
    tokens = TokenFile.open(token_path)
    token_path.write_text("llama short\n")
    assert tokens.allows("llama", A)
    assert "line 1" in tokens.problem
    token_path.unlink()
    assert tokens.allows("llama", A)
    token_path.write_text(f"llama {B}\n")
    assert not tokens.allows("llama", A) and not tokens.problem


@pytest.mark.parametrize("text", ["one", "job short", f"job {A} more"])
def test_a_wrong_line_is_named(text):
    with pytest.raises(BadTokenFile, match="line 2"):
        parse_tokens(f"ok {A}\n{text}\n")


def test_a_missing_token_file_is_named(tmp_path):
    with pytest.raises(BadTokenFile, match="No such file"):
        TokenFile.open(tmp_path / "none")


@pytest.mark.parametrize(("header", "token"), [(f"Bearer {A}", A), (f"bearer  {A} ", A), (A, "")])
def test_a_bearer_header_is_read(header, token):
    assert bearer(header) == token


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "10.0.0.1", "lighthouse.example"])
def test_plain_text_is_refused_off_loopback_unless_said(host):
    with pytest.raises(PlainTextRefused):
        require_safe_bind(host, has_tls=False, insecure=False)
    require_safe_bind(host, has_tls=True, insecure=False)
    require_safe_bind(host, has_tls=False, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
def test_plain_text_is_fine_on_loopback(host):
    require_safe_bind(host, has_tls=False, insecure=False)


def test_unusable_certificates_are_named(tmp_path):
    with pytest.raises(BadSetting, match="certificate files"):
        tls_context(cert=tmp_path / "no.pem", key=tmp_path / "no.key")
