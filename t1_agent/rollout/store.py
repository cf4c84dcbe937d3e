"""Episodes on disk: one parquet file a collection, fixed schema, exact round trip.

Arrays are stored as raw little-endian bytes with their dtype and shape, so that what is read back is bit-identical to what was
written. DuckDB, pandas and polars open the files directly for statistics (the scalar columns need no decoding).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from t1_agent.types import Trajectory, Turn

STORE_VERSION = 1
"""Bumped when a column changes meaning."""

_ARRAYS = (
    "token_ids",
    "loss_mask",
    "logprobs",
    "turn_index",
    "rewards",
    "routes",
    "routes_valid",
    "weight_versions",
    "segment_ends",
)
_SCALARS = ("task_id", "terminated", "truncated", "end_reason", "verifiers_passed", "verifiers_total")


def _schema() -> Any:
    import pyarrow as pa

    array = pa.struct([("dtype", pa.string()), ("shape", pa.list_(pa.int64())), ("data", pa.large_binary())])
    fields = [
        ("task_id", pa.string()),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("end_reason", pa.string()),
        ("verifiers_passed", pa.int32()),
        ("verifiers_total", pa.int32()),
        *((name, array) for name in _ARRAYS),
        ("segment_digests", pa.list_(pa.string())),
        ("repairs", pa.string()),
        ("turns", pa.string()),
        ("metadata", pa.string()),
    ]
    return pa.schema(fields, metadata={b"t1_store_version": str(STORE_VERSION).encode()})


def _pack(array: npt.NDArray[Any] | None) -> dict[str, Any] | None:
    if array is None:
        return None
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return {"dtype": array.dtype.str.lstrip("<>=|"), "shape": list(array.shape), "data": little.tobytes()}


def _unpack(cell: dict[str, Any] | None) -> npt.NDArray[Any] | None:
    if cell is None:
        return None
    return np.frombuffer(cell["data"], dtype=np.dtype(cell["dtype"]).newbyteorder("<")).reshape(cell["shape"]).copy()


def _row(trajectory: Trajectory) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(trajectory, name) for name in _SCALARS}
    row.update({name: _pack(getattr(trajectory, name)) for name in _ARRAYS})
    row["segment_digests"] = list(trajectory.segment_digests)
    row["repairs"] = json.dumps(trajectory.repairs, sort_keys=True)
    row["turns"] = json.dumps([asdict(turn) for turn in trajectory.turns])
    row["metadata"] = json.dumps(trajectory.metadata, sort_keys=True)
    return row


def save_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write episodes to a parquet file, atomically: the file is there whole or not at all.

    Args:
        path: Destination; its folder is created.
        trajectories: Episodes in order.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([_row(trajectory) for trajectory in trajectories], schema=_schema())
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    temporary = Path(name)
    try:
        pq.write_table(table, temporary, compression="zstd")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_trajectories(path: Path) -> list[Trajectory]:
    """Read episodes back, bit-identical.

    Args:
        path: A file written by ``save_trajectories``.

    Raises:
        ValueError: If the file is of another version.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    version = (table.schema.metadata or {}).get(b"t1_store_version", b"none").decode()
    if version != str(STORE_VERSION):
        raise ValueError(f"{path}: store version {version}, this version of t1_agent reads {STORE_VERSION}")
    return [_trajectory(row) for row in table.to_pylist()]


def _trajectory(row: dict[str, Any]) -> Trajectory:
    fields: dict[str, Any] = {name: row[name] for name in _SCALARS}
    fields.update({name: _unpack(row[name]) for name in _ARRAYS})
    turns: Sequence[dict[str, Any]] = json.loads(row["turns"])
    return Trajectory(
        **fields,
        segment_digests=tuple(row["segment_digests"]),
        repairs=json.loads(row["repairs"]),
        turns=tuple(Turn(**turn) for turn in turns),
        metadata=json.loads(row["metadata"]),
    )
