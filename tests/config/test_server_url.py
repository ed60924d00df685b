"""URLs of servers as users paste them: where requests go, and what is refused."""

from __future__ import annotations

import pytest

from ebbench.config.server_url import ServerUrl, is_server_url
from ebbench.errors import UsageError

HOST = "http://10.0.0.7:8000"


@pytest.mark.parametrize(
    "path", ["", "/", "/v1", "/v1/", "//v1", "/v1/completions", "/v1/completions/", "/v1/models", "#top"]
)
def test_a_plain_server_is_found_however_it_is_written(path: str) -> None:
    url = ServerUrl.parse(HOST + path)
    assert url.endpoint("completions") == f"{HOST}/v1/completions"
    assert url.page("health") == f"{HOST}/health"
    assert str(url) == HOST


@pytest.mark.parametrize(
    ("path", "api", "root"),
    [
        ("/team-a", "/team-a/v1", "/team-a"),
        ("/team-a/v1/chat/completions", "/team-a/v1", "/team-a"),
        ("/openai/v1/", "/openai/v1", "/openai"),
        ("/api/v3", "/api/v3", "/api"),
        ("/v1beta/openai", "/v1beta/openai", ""),
        ("/serving-endpoints/completions", "/serving-endpoints", "/serving-endpoints"),
        ("/llama-v3", "/llama-v3/v1", "/llama-v3"),
    ],
)
def test_other_api_roots_are_taken_as_they_stand(path: str, api: str, root: str) -> None:
    url = ServerUrl.parse(HOST + path)
    assert url.endpoint("models") == f"{HOST}{api}/models"
    assert url.page("metrics") == f"{HOST}{root}/metrics"


def test_a_query_goes_with_requests_of_the_api_only() -> None:
    url = ServerUrl.parse(f"{HOST}/openai/deployments/m/chat/completions?api-version=2024-10-21")
    assert url.endpoint("chat/completions") == f"{HOST}/openai/deployments/m/chat/completions?api-version=2024-10-21"
    assert url.page("health") == f"{HOST}/openai/deployments/m/health"
    assert url.named == "chat"
    assert ServerUrl.parse(f"{HOST}/v1?api-version=1").endpoint("models") == f"{HOST}/v1/models?api-version=1"


def test_scheme_and_address_forms() -> None:
    assert is_server_url("HTTPS://Host/v1")
    assert ServerUrl.parse("HTTPS://host/v1").endpoint("models") == "https://host/v1/models"
    assert ServerUrl.parse("https://host").secure
    assert ServerUrl.parse("http://[::1]:8000/v1").endpoint("models") == "http://[::1]:8000/v1/models"
    assert not is_server_url("unix:///tmp/socket")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("http://", "no server URL"),
        ("http:///v1", "no server URL"),
        ("http://:8000", "no server URL"),
        ("http://h:99999", "Port out of range"),
        ("http://h:0", "no server URL"),
        ("http://h:80:80", "no server URL"),
        ("http://h:http", "no server URL"),
        ("http://[::1", "no server URL"),
        ("http://a host/v1", "no server URL"),
        ("http://host/v1\n", "no server URL"),
        ("http://me:pass@host", "leave credentials out"),
        ("http://host/v1?api_key=abc", "leave credentials out"),
        ("http://host/v1?access_token=abc", "leave credentials out"),
    ],
)
def test_what_is_no_server_is_refused_in_one_line(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        ServerUrl.parse(text)
    assert "\n" not in str(refused.value)
