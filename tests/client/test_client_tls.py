"""TLS with a certificate authority of one's own, and servers of several models."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbench.client.server_queries import _distinct_models
from ebbench.errors import RunError, UsageError
from ebbench.fakeserver.config import FakeConfig
from ebbench.fakeserver.process import FakeServerProcess
from tests.client.client_runs import column, plan_of, run
from tests.gate.gate_data import invoke


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a self-signed authority (ca.pem) and a server's certificate for 127.0.0.1 (server.pem, .key)."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "rsa:2048", "-nodes")
    # From Python 3.13 on an authority must say what its key is for, and a certificate which authority signed it.
    usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
    authority = ("-out", "ca.pem", "-days", "2", "-subj", "/CN=test authority", *usage)
    openssl("req", "-x509", *new, "-keyout", "ca.key", *authority)
    openssl("req", "-x509", *new, "-keyout", "x.key", "-out", "other.pem", "-days", "2", "-subj", "/CN=another")
    openssl("req", *new, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "server.csr", *signed, "-out", "server.pem")
    return folder


@pytest.fixture(scope="module")
def server(certificates: Path) -> Iterator[FakeServerProcess]:
    config = FakeConfig(
        ttft_ms=1, itl_ms=1, ssl_certfile=str(certificates / "server.pem"), ssl_keyfile=str(certificates / "server.key")
    )
    with FakeServerProcess(config) as running:
        yield running


def completed(server: FakeServerProcess, environ: dict[str, str] | None = None, **options: object) -> int:
    return column(run(server.url, plan_of(12), environ, ready_timeout_s=20.0, **options), "status").count("ok")


@pytest.mark.parametrize("transport", ["direct", "httpx"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_certificate_authority_given_by_the_user_is_trusted(
    server: FakeServerProcess, certificates: Path, workers: int, transport: str
) -> None:
    ca_file = str(certificates / "ca.pem")
    assert completed(server, ca_file=ca_file, workers=workers, transport=transport) == 12
    environ = {**os.environ, "SSL_CERT_FILE": ca_file}
    assert completed(server, environ, workers=workers, transport=transport) == 12


def test_an_unknown_authority_is_refused_at_once_with_what_to_do(server: FakeServerProcess, certificates: Path) -> None:
    with pytest.raises(RunError, match=r"CERTIFICATE_VERIFY_FAILED.*--ca-file FILE or in SSL_CERT_FILE.*--insecure"):
        completed(server)
    with pytest.raises(RunError, match="CERTIFICATE_VERIFY_FAILED"):  # only the file given is trusted
        completed(server, ca_file=str(certificates / "other.pem"))
    assert completed(server, verify_tls=False) == 12


@pytest.mark.parametrize("name", ["server.key", "missing.pem"])
def test_files_without_certificates_are_named(server: FakeServerProcess, certificates: Path, name: str) -> None:
    path = str(certificates / name)
    with pytest.raises(UsageError, match=rf"--ca-file .*{name}"):
        completed(server, ca_file=path)
    with pytest.raises(UsageError, match=rf"SSL_CERT_FILE .*{name}"):
        completed(server, {"SSL_CERT_FILE": path})


def test_a_server_of_two_models_asks_which() -> None:
    with FakeServerProcess(FakeConfig(ttft_ms=1, itl_ms=1, model="small", further_models=("large",))) as server:
        with pytest.raises(UsageError, match="several models: small, large; say which with --model"):
            completed(server)
        assert completed(server, model="large") == 12
        with pytest.raises(UsageError, match="does not serve 'medium'; it serves large, small"):
            completed(server, model="medium")


def test_names_of_one_model_are_one_model() -> None:
    names = {"a": {"root": "org/model"}, "b": {"root": "org/model"}, "lora": {"root": "/adapters/x", "parent": "a"}}
    assert _distinct_models(names) == ["a"]
    assert _distinct_models({"lora": names["lora"], "b": {}}) == ["lora", "b"]
    assert _distinct_models({"a": {}, "b": {}}) == ["a", "b"]


@pytest.mark.parametrize("words", [("--ca-file", "ca.pem"), ("--insecure",)])
def test_options_of_https_are_refused_for_http(words: tuple[str, ...]) -> None:
    done = invoke("run", "balanced", "--engine", "http://127.0.0.1:1", "-n", "2", *words)
    assert done.exit_code == 2
    assert f"{words[0]} is for https" in done.stderr
