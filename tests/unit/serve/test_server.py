"""Where the server listens, and the token that it asks for."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tranship.serve.server import Address, listen, read_token, url_of
from tranship.types import UserError


def test_a_token_is_made_kept_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    made = read_token(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_token(file) == made == file.read_text().strip()
    assert len(made) >= 32
    assert len({made, read_token(None), read_token(None)}) == 3


@pytest.mark.parametrize(
    "content", ["", "\n", "short", "two words that are long enough", "two\nlines-long-enough", "é" * 20]
)
def test_files_that_hold_no_token(content: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(UserError, match="holds no token"):
        read_token(file)


def test_token_files_that_cannot_be_used(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "gone" / "token"):
        with pytest.raises(UserError, match="--token-file"):
            read_token(file)


def test_addresses() -> None:
    with listen(Address("127.0.0.1", 0, "t")) as bound:
        assert bound.getsockname()[0] == "127.0.0.1"
        port = bound.getsockname()[1]
        assert url_of(bound) == f"http://127.0.0.1:{port}/v1"
        bound.listen()
        with pytest.raises(UserError, match=f"port {port} cannot be listened on"):
            listen(Address("127.0.0.1", port, "t"))
    with pytest.raises(UserError, match="cannot be listened on"):
        listen(Address("no.such.host.invalid", 0, "t"))
