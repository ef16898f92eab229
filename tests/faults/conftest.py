"""Mounts for the fault tests: a file system that fails on request, and two that are soon full."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults.faultfs import MountedFaultFS, is_mounted
from tools import require_module, require_root, require_tool, skip_or_fail

NEEDS = "needs /dev/fuse, fuse3 and mfusepy"


@pytest.fixture
def faultfs_factory(tmp_path: Path) -> Iterator[Callable[..., MountedFaultFS]]:
    """Makes mounts of faultfs.py, with the options of its command line, and takes them down after the test."""
    require_tool("/dev/fuse", "the fuse module of the kernel", NEEDS)
    require_tool("fusermount3", "fuse3", NEEDS)
    require_module("mfusepy", "mfusepy", NEEDS)
    numbers = itertools.count(1)
    with contextlib.ExitStack() as stack:

        def make(*options: str) -> MountedFaultFS:
            mounted = MountedFaultFS(tmp_path / f"faultfs-{next(numbers)}", *options)
            stack.callback(mounted.close)
            mounted.wait_until_mounted()
            return mounted

        yield make


@pytest.fixture
def faultfs(faultfs_factory: Callable[..., MountedFaultFS]) -> MountedFaultFS:
    """A file system that fails on request; flock(2) is the kernel's and works."""
    return faultfs_factory()


@pytest.fixture
def faultfs_granting(faultfs_factory: Callable[..., MountedFaultFS]) -> MountedFaultFS:
    """The same, which grants every flock(2) and so excludes no one."""
    return faultfs_factory("--grant-every-flock")


@contextlib.contextmanager
def _mounted(path: Path, mount_arguments: list[str]) -> Iterator[Path]:
    mount = require_tool("mount", "mount")
    umount = require_tool("umount", "mount")
    path.mkdir()
    mounted = subprocess.run([mount, *mount_arguments, str(path)], check=False, capture_output=True, text=True)
    if mounted.returncode != 0:
        skip_or_fail(f"needs a mount that works here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        if subprocess.run([umount, str(path)], check=False, capture_output=True).returncode != 0:
            subprocess.run([umount, "--lazy", str(path)], check=False, capture_output=True)
        assert not is_mounted(path), f"{path} is still mounted"


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    require_root("to mount a tmpfs")
    with _mounted(tmp_path / "small-tmpfs", ["-t", "tmpfs", "-o", "size=1m", "tmpfs"]) as path:
        yield path


@pytest.fixture
def small_ext4(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 4 MiB, in an image file."""
    require_root("to mount an ext4 image")
    require_tool("/dev/loop-control", "the loop module of the kernel")
    mkfs = require_tool("mkfs.ext4", "e2fsprogs")
    image = tmp_path / "small-ext4.img"
    with open(image, "wb") as file:
        file.truncate(4 << 20)
    subprocess.run([mkfs, "-q", str(image)], check=True)
    with _mounted(tmp_path / "small-ext4", ["-t", "ext4", "-o", "loop", str(image)]) as path:
        yield path
