"""A load of sessions as plain arrays, and back: what a load generator is handed in a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.core.load.sends import Following
from kvbench.core.sessions.session_load import SessionLoad

Arrays = Mapping[str, NDArray[Any]]


def load_arrays(load: SessionLoad) -> dict[str, NDArray[Any]]:
    """By name; of lists of lists what they hold in a row, and where each ends. Prompts have no answers."""
    size, following = load.block_tokens, load.following
    own = [nodes[: length // size] for nodes, length in zip(load.prompts, load.input_len, strict=True)]
    goes_on = load.goes_on or [-1] * load.requests
    return {
        "block_tokens": np.array([size], np.int64),
        "offsets_s": np.asarray(load.offsets_s, np.float64),
        "input_len": np.asarray(load.input_len, np.int64),
        "output_len": np.asarray(load.output_len, np.int64),
        "goes_on": np.asarray(goes_on, np.int64),
        "think_time_s": np.asarray(following.think_time_s, np.float64),
        "session": np.asarray(following.session, np.int64),
        "turn": np.asarray(following.turn, np.int64),
        "last": np.asarray(following.last, np.bool_),
        "after": np.array([each for row in following.after for each in row], np.int64),
        "after_ends": np.cumsum([len(row) for row in following.after], dtype=np.int64),
        "nodes": np.concatenate([*own, np.zeros(0, np.int64)]),
        "nodes_ends": np.cumsum([len(row) for row in own], dtype=np.int64),
    }


def load_of_arrays(arrays: Arrays) -> SessionLoad:
    """The load that they are of. Raises ValueError, KeyError where they are of none."""
    after = [tuple(row.tolist()) for row in np.split(arrays["after"], arrays["after_ends"][:-1])]
    requests = len(arrays["input_len"])
    following = Following(
        after,
        arrays["think_time_s"].tolist(),
        arrays["session"].tolist(),
        arrays["turn"].tolist(),
        arrays["last"].tolist(),
    )
    load = SessionLoad(
        arrays["offsets_s"].tolist(),
        arrays["input_len"].tolist(),
        arrays["output_len"].tolist(),
        following,
        np.split(arrays["nodes"], arrays["nodes_ends"][:-1]),
        int(arrays["block_tokens"][0]),
        arrays["goes_on"].tolist(),
    )
    rows = (load.offsets_s, load.output_len, load.goes_on, load.prompts, *vars(following).values())
    if not requests or any(len(each) != requests for each in rows):
        raise ValueError("its columns are not of the same requests")
    return load
