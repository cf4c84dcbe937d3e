"""The root of a verification clone: a throw-away layer over everything the (frozen) sandbox wrote, or over a view of it."""

from __future__ import annotations

import os

from t1_env.sandbox import files, mask_layer, masking, stacking, syscalls, trees
from t1_env.sandbox.masking import Masks, Part
from t1_env.sandbox.rootfs import Template
from t1_env.sandbox.stacking import ROOT, SYSTEM_NAMES, Stack


def build_clone_root(
    template: Template,
    stack: Stack,
    *,
    storage_mb: int,
    masks: Masks | None = None,
    restored: bool = False,
    copied: bool = False,
) -> None:
    """Assemble a clone's root at ``template.clone_root``.

    Unless ``copied``, the cost does not depend on how much the sandbox wrote: only directories are stacked.

    Args:
        template: The zygote's template.
        stack: What the sandbox's root started from.
        storage_mb: Size in MiB of everything that the clone can write.
        masks: What the agent did to the base system; None if nobody looked.
        restored: Whether that is taken back.
        copied: Whether to stand on a copy of what the agent wrote, because its processes are to go on.

    Raises:
        OSError: A mount was refused, or there is no room.
    """
    store, upper = template.store, template.clone_store
    syscalls.mount("t1", upper, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, f"size={storage_mb * (2 if copied else 1)}m,mode=755")
    for part in stack.parts(template):
        os.makedirs(f"{upper}/up/{part}", 0o755)
        os.makedirs(f"{upper}/work/{part}", 0o755)
        stacking.copy_attributes(f"{store}/up/{part}", f"{upper}/up/{part}")
    written = f"{upper}/copy" if copied else f"{store}/up"
    if copied:
        _copy_writes(template, stack, written)
    layers: dict[str, str] = {}
    mounts: list[tuple[Part, str, str]] = []
    if masks is not None and (masks.caches or (restored and masks)):
        for each in system_parts(template, stack):
            layer = layers[each.name] = f"{upper}/mask/{each.name}"
            os.makedirs(layer, 0o755)
            stacking.copy_attributes(f"{store}/up/{each.name}", layer)
            mounts += [(each, *mount) for mount in mask_layer.lay_masks(layer, each, masks, restored=restored)]
    for part in stack.parts(template):
        target = template.clone_root if part == ROOT else f"{template.clone_root}/{part}"
        lowers = stacking.lowers_of(template, stack, part)
        mask = (layers[part],) if part in layers else ()
        stacking.overlay(target, store, (*mask, f"{written}/{part}", *lowers), f"{upper}/up/{part}", f"{upper}/work/{part}")
    for index, (each, path, original) in enumerate(mounts):
        if os.path.isdir(original):
            _mount_directory(template, each, path, index)
        else:
            syscalls.bind(original, f"{template.clone_root}{path}", read_only=True)


def _mount_directory(template: Template, part: Part, path: str, index: int) -> None:
    """Put a directory back as it was: all that lay below the agent's writes at this path."""
    found = masking.layers_of(part.lowers, path[len(part.at) :])
    target = f"{template.clone_root}{path}"
    if len(found) == 1:
        syscalls.bind(found[0], target, read_only=True)
        return
    short = f"{template.clone_store}/back/{index}"
    os.makedirs(short)
    for number, directory in enumerate(found):
        os.symlink(directory, f"{short}/{number}")  # a short name without the characters that mount options give a meaning
    os.chdir(short)
    try:
        data = f"lowerdir={':'.join(map(str, range(len(found))))},userxattr"
        syscalls.mount("t1", target, "overlay", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_RDONLY, data)
    finally:
        os.chdir("/")


def _copy_writes(template: Template, stack: Stack, target: str) -> None:
    for part in stack.parts(template):
        os.makedirs(f"{target}/{part}", 0o755)
        source_fd = os.open(f"{template.store}/up/{part}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        target_fd = os.open(f"{target}/{part}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            trees.copy_tree(source_fd, target_fd, overlay="keep")
        finally:
            os.close(source_fd)
            os.close(target_fd)


def system_parts(template: Template, stack: Stack) -> tuple[Part, ...]:
    """The overlays that hold the base system, and what was written to each; none where that cannot be told."""
    store = template.store
    if stack.rootfs is not None:
        if not stack.foreign:
            lowers, base = stacking.lowers_of(template, stack, ROOT), stacking.base_of(template, stack, ROOT)
            return (Part(ROOT, "", f"{store}/up/{ROOT}", lowers, base, SYSTEM_NAMES),)
        return () if stack.written is None else (Part(ROOT, "", stack.written, stack.below, stack.below, SYSTEM_NAMES),)
    below, base = stacking.lowers_of(template, stack, ROOT), stacking.base_of(template, stack, ROOT)
    root = Part(ROOT, "", f"{store}/up/{ROOT}", below, base, frozenset(template.links))
    rest = (
        Part(name, f"/{name}", f"{store}/up/{name}", stacking.lowers_of(template, stack, name), stacking.base_of(template, stack, name))
        for name in template.layers
    )
    return (root, *rest)


def system_changes(template: Template, stack: Stack) -> dict[str, str]:
    """Files of the base system that the sandbox changed, replaced or removed: path -> a mark that changes with every further change."""
    found: dict[str, str] = {}
    for part in system_parts(template, stack):
        if part.at or stack.rootfs is not None:
            found |= files.changed_files(part.written, part.base, part.at, only=part.only)
    return found


def links_of(template: Template, stack: Stack) -> dict[str, str]:
    """Top-level links of the base system (``bin`` -> ``usr/bin``), wherever the agent has put them since."""
    if stack.rootfs is None:
        return dict(template.links)
    lowers = stack.below if stack.foreign else stacking.base_of(template, stack, ROOT)
    found = {}
    for name in SYSTEM_NAMES:
        original = masking.find_original(lowers, f"/{name}")
        if original is not None and os.path.islink(original):
            found[name] = os.readlink(original).strip("/")
    return found
