"""The archive: readable by any zip program, and by specc only when no byte is out of place."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from specc.artifact.container import ALIGNMENT, Container, ContainerWriter
from specc.errors import ArtifactError
from tests.packages import pack

FILES = {"a.txt": b"hello", "sub/b.json": b"x" * 130, "ab": b"", "ac": b"zz"}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return pack(tmp_path / "x.zip", FILES)


def fault(path: Path) -> str:
    def read() -> None:
        container = Container(path)
        for name in container.entries:
            container.check_crc(name)

    with pytest.raises(ArtifactError) as caught:
        read()
    assert str(path) in str(caught.value)
    return str(caught.value)


def patched(path: Path, old: bytes, new: bytes, count: int) -> Path:
    content = path.read_bytes()
    assert content.count(old) == count
    path.write_bytes(content.replace(old, new))
    return path


def test_round_trip_and_any_zip_program(archive: Path) -> None:
    container = Container(archive)
    assert {n: bytes(container.content(n)) for n in container.entries} == FILES
    assert all(e.offset % ALIGNMENT == 0 for e in container.entries.values())
    with zipfile.ZipFile(archive) as other:
        assert other.testzip() is None
        assert {n: other.read(n) for n in other.namelist()} == FILES


def test_equal_input_equal_bytes(archive: Path, tmp_path: Path) -> None:
    assert pack(tmp_path / "y.zip", FILES).read_bytes() == archive.read_bytes()


def test_every_changed_byte_is_found(archive: Path, tmp_path: Path) -> None:
    content = archive.read_bytes()
    target = tmp_path / "changed.zip"
    for index in range(len(content)):
        changed = bytearray(content)
        changed[index] ^= 0x40
        target.write_bytes(changed)
        fault(target)


def test_every_truncation_is_found(archive: Path, tmp_path: Path) -> None:
    content = archive.read_bytes()
    target = tmp_path / "short.zip"
    for length in range(len(content)):
        target.write_bytes(content[:length])
        fault(target)


def test_bytes_before_or_behind_are_found(archive: Path) -> None:
    content = archive.read_bytes()
    archive.write_bytes(b"\0" * 64 + content)
    fault(archive)
    archive.write_bytes(content + b"\0")
    assert "no directory" in fault(archive)


@pytest.mark.parametrize(
    "name", [b"../xy", b"/etc/", b"a/../", b"A.txt", b"a\\txt", b"a.tx\0", b".a.tx", b"a..tx"]
)
def test_names_that_are_not_plain_are_refused(archive: Path, name: bytes) -> None:
    assert "a plain relative path" in fault(patched(archive, b"a.txt", name, 2))


@pytest.mark.parametrize("name", ["../up", "/root", "Upper", "sp ace", "a.txt", ""])
def test_the_writer_refuses_them_too(tmp_path: Path, name: str) -> None:
    with (tmp_path / "w.zip").open("wb") as file:
        writer = ContainerWriter(file)
        writer.add("a.txt", [b""])
        with pytest.raises(ValueError, match="not a free name"):
            writer.add(name, [b""])


def test_a_name_given_twice(archive: Path) -> None:
    content = archive.read_bytes()
    at = content.rindex(b"ac")
    archive.write_bytes(content[:at] + b"ab" + content[at + 2 :])
    assert "ab twice" in fault(archive)


def central(archive: Path, name: bytes) -> int:
    """Return where the directory's record of a file begins."""
    return archive.read_bytes().rindex(name) - 46


def test_a_link_is_refused(archive: Path) -> None:
    content = bytearray(archive.read_bytes())
    at = central(archive, b"a.txt") + 38
    content[at : at + 4] = (0o120777 << 16).to_bytes(4, "little")
    archive.write_bytes(content)
    assert "such as a link's" in fault(archive)


def test_compressed_content_is_refused(archive: Path) -> None:
    content = bytearray(archive.read_bytes())
    content[central(archive, b"a.txt") + 10] = 8
    archive.write_bytes(content)
    assert "entry a.txt: found compression 8" in fault(archive)


def test_another_program_s_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as other:
        other.writestr("manifest.json", b"0" * (1 << 22))
    assert path.stat().st_size < 1 << 14
    assert "another kind of zip archive" in fault(path)


def test_a_size_beyond_the_file(archive: Path) -> None:
    content = bytearray(archive.read_bytes())
    at = content.rindex(b"a.txt") + 5 + 4
    content[at : at + 16] = (1 << 40).to_bytes(8, "little") * 2
    archive.write_bytes(content)
    assert f"{1 << 40} bytes" in fault(archive)


def test_not_a_file(tmp_path: Path) -> None:
    assert "no file" in fault(tmp_path / "none.specc")
    assert "not a file" in fault(tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    assert "0 bytes" in fault(tmp_path / "empty")
