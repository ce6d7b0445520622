"""Errors of listening sockets name the option that helps."""

import socket

import pytest

from router.config.settings import Settings
from router.http import listen

NOT_HERE = "192.0.2.1"  # an address for documents (RFC 5737), which no machine has


def test_an_address_of_another_machine_is_an_error_of_the_host() -> None:
    with pytest.raises(OSError, match=rf"cannot listen on {NOT_HERE} port 0: .+; choose --host"):
        listen.bind(Settings(host=NOT_HERE, port=0))


def test_a_port_in_use_is_an_error_of_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1 port {port}: .+; choose --port"):
            listen.bind(Settings(port=port))
