"""What was written comes back, whatever happened to the end of the file."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tranship.dock.journal import Journal

ENTRIES = [["m", 1.5, "name", b"bytes"], ["e", 2.0], ["s", 3.0, [1, [2], True], None]]


def written(path, entries=ENTRIES) -> Journal:
    journal = Journal(path)
    for entry in entries:
        journal.append(*entry)
    return journal


def test_entries_come_back_and_more_can_follow(tmp_path):
    written(tmp_path / "journal").close()
    journal = Journal(tmp_path / "journal")
    assert list(journal.entries()) == ENTRIES
    journal.append("more")
    assert list(journal.entries()) == [*ENTRIES, ["more"]]
    assert os.stat(tmp_path / "journal").st_mode & 0o777 == 0o600


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_torn_or_damaged_end_is_as_if_it_had_never_been(tmp_path, data):
    path = tmp_path / "journal"
    path.unlink(missing_ok=True)
    sizes = [0]
    journal = Journal(path)
    for entry in ENTRIES:
        journal.append(*entry)
        sizes.append(journal.nbytes)
    journal.close()
    content = bytearray(path.read_bytes())[: sizes[-1]]
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:place]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(content))
    whole = sum(size <= place for size in sizes[1:])
    journal = Journal(path)
    assert list(journal.entries()) == ENTRIES[:whole]
    assert journal.nbytes == sizes[whole]
    assert not any(path.read_bytes()[sizes[whole] :])
    journal.append("more")
    assert list(journal.entries()) == [*ENTRIES[:whole], ["more"]]
    journal.close()


def test_it_starts_again_at_once(tmp_path):
    journal = written(tmp_path / "journal")
    journal.start_again("base", {"a": 1})
    journal.append("more")
    journal.close()
    assert list(Journal(tmp_path / "journal").entries()) == [["base", {"a": 1}], ["more"]]
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]


@pytest.fixture
def full(monkeypatch):
    """From the call on the file system has no room for more."""

    def no_room(descriptor, offset, length):
        raise OSError(errno.ENOSPC, "no space left on device")

    return lambda: monkeypatch.setattr(os, "posix_fallocate", no_room)


def test_a_full_file_system_leaves_nothing_of_an_entry(tmp_path, full, monkeypatch):
    journal = written(tmp_path / "journal")
    full()
    with pytest.raises(OSError, match="no space"):
        journal.append("lost", b"x" * (1 << 20))
    journal.append("more")
    assert list(journal.entries()) == [*ENTRIES, ["more"]]
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[: len(data) // 2], at))
    with pytest.raises(OSError, match="were written"):
        journal.append("torn", b"x" * 100)
    monkeypatch.undo()
    journal.append("end")
    assert list(journal.entries()) == [*ENTRIES, ["more"], ["end"]]


def test_room_that_was_set_aside_is_there_when_the_file_system_is_full(tmp_path, full):
    journal = written(tmp_path / "journal")
    journal.make_room(300_000)
    full()
    with pytest.raises(OSError, match="no space"):
        journal.make_room(1 << 20)
    for number in range(10):
        journal.append(number, b"x" * 29_000)
    journal.close()
    assert [entry[0] for entry in Journal(tmp_path / "journal").entries()] == ["m", "e", "s", *range(10)]


def test_a_journal_that_cannot_start_again_goes_on(tmp_path, full):
    journal = written(tmp_path / "journal")
    full()
    with pytest.raises(OSError, match="no space"):
        journal.start_again("base", room=1000)
    journal.append("more")
    assert list(journal.entries()) == [*ENTRIES, ["more"]]
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
