"""``t1-env images``: root filesystems for the local sandbox, and the layers that were built on them."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from t1_env.errors import ConfigError
from t1_env.sandbox.images import Image, ImageError, ImageStore
from t1_env.sandbox.imports import import_image
from t1_env.sandbox.layers import LayerStore

EXIT_OK = 0
_UNITS = ("B", "kB", "MB", "GB", "TB")


def import_command(source: str, name: str | None) -> int:
    """Import a root filesystem and say what it is called.

    Args:
        source: A directory or an archive.
        name: What to call it; default what the archive says, else the name of the file.

    Returns:
        0.

    Raises:
        ImageError: It cannot be imported.
    """
    started = time.monotonic()
    image = import_image(Path(source), name)
    seconds = time.monotonic() - started
    _print(f"{', '.join(image.names)}  {image.digest}")
    _print(f"{image.entries} entries, {size(image.size_bytes)}, {seconds:.1f} s")
    for note in image.notes:
        _print(f"note: {note}")
    return EXIT_OK


def list_command(*, layers: bool) -> int:
    """Print the images (or the layers) that are there.

    Args:
        layers: Whether to list layers instead.

    Returns:
        0.
    """
    console = Console(highlight=False, soft_wrap=True)
    table = Table()
    if layers:
        found = LayerStore().all()
        for heading in ("layer", "size", "last used", "made by"):
            table.add_column(heading, overflow="fold")
        for layer in found:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(layer.used))
            table.add_row(layer.digest[:16], size(layer.size_bytes), used, layer.instruction[:100])
        console.print(table)
        console.print(f"{len(found)} layers, {size(sum(layer.size_bytes for layer in found))}", markup=False)
        return EXIT_OK
    store = ImageStore()
    for heading in ("name", "digest", "entries", "size", "imported"):
        table.add_column(heading, overflow="fold")
    for image in store.all():
        table.add_row(
            "\n".join(image.names) or "-",
            image.digest[:19],
            str(image.entries),
            size(image.size_bytes),
            image.created[:16].replace("T", " "),
        )
    console.print(table)
    for pattern, target in store.map().items():
        console.print(f"map: {pattern} = {target}", markup=False)
    console.print("any other name after FROM stands for this machine's own system directories", markup=False)
    return EXIT_OK


def inspect_command(name: str) -> int:
    """Print all that is known of an image as JSON.

    Args:
        name: A name or a digest.

    Returns:
        0.

    Raises:
        ImageError: There is no such image.
    """
    image = _get(name)
    fields = {field: getattr(image, field) for field in Image.__dataclass_fields__}
    _print(json.dumps(fields, indent=2, default=list))
    return EXIT_OK


def remove_command(names: list[str]) -> int:
    """Remove images.

    Args:
        names: Names, or digests to remove an image with all of its names.

    Returns:
        0.

    Raises:
        ImageError: There is no such image, or it is in use.
    """
    for name in names:
        digest, gone = ImageStore().remove(name)
        _print(f"removed {name} ({digest[:19]})" if gone else f"removed the name {name}; {digest[:19]} has others and stays")
    return EXIT_OK


def prune_command(*, everything: bool, max_mb: int | None, unused_days: float | None) -> int:
    """Remove cached layers, least recently used first; never one that is in use.

    Args:
        everything: Remove all that are not in use.
        max_mb: Size in MB that may stay.
        unused_days: Remove what was not used for so many days.

    Returns:
        0.

    Raises:
        ConfigError: Nothing was said about what may stay.
    """
    if not everything and max_mb is None and unused_days is None:
        raise ConfigError("images prune: say what may stay with --max-mb or --unused-days, or remove all that is not in use with --all")
    if everything and (max_mb is not None or unused_days is not None):
        raise ConfigError("images prune: --all removes everything that is not in use; give either that or limits")
    pruned = LayerStore().prune(
        max_bytes=None if max_mb is None else max_mb * 10**6, unused_for_s=None if unused_days is None else unused_days * 86400
    )
    stays = f"; {pruned.in_use} in use" if pruned.in_use else ""
    _print(f"removed {pruned.removed} layers ({size(pruned.freed_bytes)}), {size(pruned.kept_bytes)} stay{stays}")
    return EXIT_OK


def map_command(pattern: str | None, target: str | None, *, remove: bool) -> int:
    """Show, add to or take from the map of image names.

    Args:
        pattern: A glob over image names; None to show the map.
        target: Name of an imported image, ``host`` or ``refuse``.
        remove: Whether to take the entry away.

    Returns:
        0.

    Raises:
        ConfigError: The arguments do not fit together, or the entry cannot be.
    """
    store = ImageStore()
    if pattern is None:
        for each, name in store.map().items():
            _print(f"{each} = {name}")
        return EXIT_OK
    if remove == (target is not None):
        raise ConfigError(
            "images map: give a pattern and what it stands for (an imported image, host or refuse), or a pattern and --remove"
        )
    if target is not None and target not in ("host", "refuse"):
        _get(target)
    store.set_map(pattern, target)
    return EXIT_OK


def size(size_bytes: int) -> str:
    """A size for people, in decimal units."""
    value = float(size_bytes)
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit in ("B", "kB") else f"{value:.1f} {unit}"


def _get(name: str) -> Image:
    image = ImageStore().get(name)
    if image is None:
        raise ImageError(f"there is no image {name!r}; see `t1-env images list`")
    return image


def _print(line: str) -> None:
    Console(highlight=False, soft_wrap=True).print(line, markup=False)
