"""The public address: the URLs in answers, independent of a request's Host, and TLS."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from agentloop.client.client import RolloutClient
from agentloop.errors import InvalidRequest
from agentloop_servers.app import application
from agentloop_servers.config.service import ServiceConfig, TlsSettings
from agentloop_servers.endpoint.direct_server import DirectServer
from agentloop_servers.net.tcp import listening_socket, url_of_socket
from tests.support.service.whole_service import simulated_config, whole_service


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsSettings:
    folder = tmp_path_factory.mktemp("tls")
    settings = TlsSettings(cert=str(folder / "cert.pem"), key=str(folder / "key.pem"))
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", settings.key, "-out", settings.cert]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return settings


@pytest.mark.parametrize(
    ("public_url", "named"),
    [
        (None, None),
        ("https://gate.example/agents/", "https://gate.example/agents"),
        ("http://10.1.2.3", "http://10.1.2.3"),
    ],
)
async def test_an_answer_names_the_services_own_address_and_never_the_requests_host(
    tmp_path: Path, public_url: str | None, named: str | None
) -> None:
    config = simulated_config(replicas=1, public_url=public_url)
    async with whole_service(config, tmp_path) as url, aiohttp.ClientSession() as http:
        for host in ("localhost:1", "127.9.9.9", url.removeprefix("http://")):
            async with http.post(f"{url}/sessions", json={}, headers={"host": host}) as answer:
                place = await answer.json()
            assert place["base_url"] == f"{named or url}/sessions/{place['session_id']}/v1"
        async with RolloutClient(url) as client, client.session() as session:
            assert session.base_url == f"{url}/sessions/{session.session_id}/v1"  # unchanged


@pytest.mark.parametrize("url", ["gate.example", "ftp://gate.example", "https://", "https://gate.example/?a=b", ""])
def test_a_public_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="public_url"):
        ServiceConfig.model_validate({"model": "examples/tiny_policy/v0", "public_url": url})


async def test_the_public_port_speaks_tls_and_the_processes_own_does_not(tls: TlsSettings) -> None:
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("served"))])
    server, public = DirectServer(app, "127.0.0.1", tls=(tls.cert, tls.key)), listening_socket("127.0.0.1")
    url, trusting = url_of_socket(public, "https"), ssl.create_default_context(cafile=tls.cert)
    own = await server.start(public=public)
    try:
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{url}/", ssl=trusting) as answer:
                assert await answer.text() == "served"
            async with http.get(f"{own}/") as answer:
                assert await answer.text() == "served"
            with pytest.raises(aiohttp.ClientError):
                async with asyncio.timeout(30), http.get(f"{url}/".replace("https", "http")):
                    pytest.fail("it answers without TLS")
        server.check_health()
    finally:
        await server.close()


def test_a_certificate_that_no_server_could_use_is_refused_before_anything_starts(
    tls: TlsSettings, tmp_path: Path
) -> None:
    tls.check()
    (tmp_path / "none.pem").write_text("none")
    for cert in ("none.pem", "absent.pem"):
        config = simulated_config(tls={"cert": str(tmp_path / cert), "key": tls.key})
        with pytest.raises(InvalidRequest, match=f"tls: .*{cert} with"):
            application(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
