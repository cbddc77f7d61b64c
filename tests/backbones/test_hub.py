"""Pretrained weights without a connection: no wait, and advice."""

import socket
import threading
import time

import pytest
from huggingface_hub import constants

from unimetric.backbones import _hub
from unimetric.errors import UnimetricError
from unimetric.spec import create


@pytest.fixture
def silent_server():
    """An address that accepts connections and never responds, as behind some firewalls."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_hub_that_does_not_respond_is_not_waited_for(tmp_path, monkeypatch, silent_server):
    monkeypatch.setattr(constants, "ENDPOINT", silent_server)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(_hub, "PATIENCE", 0.2)
    began = time.perf_counter()
    with pytest.raises(UnimetricError, match="cannot create `test_vit`") as caught:
        create("backbones", "timm(name='test_vit', pretrained=True)")
    assert time.perf_counter() - began < 10
    assert "timm/test_vit.r160_in1k/resolve/main/model.safetensors" in caught.value.hint
    assert "weights='path/to/model.safetensors'" in caught.value.hint and str(tmp_path) in caught.value.hint
    assert not constants.HF_HUB_OFFLINE  # as before


def test_any_response_of_a_server_counts():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def respond():
            connection, _ = server.accept()
            connection.recv(1024)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=respond)
        thread.start()
        assert _hub.hub_answers(f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()


def test_unknown_tag_gets_another_hint():
    with pytest.raises(UnimetricError) as caught:
        create("backbones", "timm(name='resnet18.nope', pretrained=True)")
    assert "list_pretrained('resnet18*')" in caught.value.hint
