"""What making sessions costs, and how like recorded ones they are: ``make perf-sessions``. It judges nothing.

A plan of a million turns is made in a separate process: time and largest memory. Then a corpus is cut in
halves at random, again and again; sessions made after one half are compared with the other by quartiles of
turns, lengths and reuse. How far the two recorded halves differ is the best that any generator can do.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvbench.core.sessions.corpus import Corpus, CorpusFigures
from kvbench.core.sessions.generator import SessionPlan, fitted_model
from kvbench.planning.corpus_files import load_corpus
from tools.bench import NEAR, ROOT, arguments, table

EXCERPT = ROOT / "tests/recorded/agentic/excerpt.jsonl.gz"
DEADLINE_S = 300.0
QUARTILES = (0.25, 0.5, 0.75)
MADE = 2_000
FEWEST = 8
"""Sessions of a corpus that can be cut in halves."""

Figures = dict[str, NDArray[np.float64]]


def plan_alone(path: Path, turns: int) -> None:
    model = fitted_model(load_corpus(path))
    begun = time.perf_counter()
    plan = model.generate(math.ceil(turns / float(np.diff(model.first).mean())), seed=1)
    took_s = time.perf_counter() - begun
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(f"{plan.turns:,} turns of {plan.sessions:,} sessions: {took_s:.2f} s, {peak_mb:.0f} MB at most")


def recorded(corpus: Corpus) -> Figures:
    figures = CorpusFigures(corpus)
    return _quartiles(
        [len(session.turns) for session in corpus.sessions],
        [turn.input_len for turn in figures.turns],
        figures.unseen(),
        [turn.output_len for turn in figures.turns],
        [reuse.share() for reuse in figures.alone],
    )


def made(plan: SessionPlan) -> Figures:
    return _quartiles(
        np.diff(plan.first).tolist(),
        plan.input_len.tolist(),
        (plan.input_len - plan.kept_len).tolist(),
        plan.output_len.tolist(),
        session_reuse(plan).tolist(),
    )


def session_reuse(plan: SessionPlan) -> NDArray[np.float64]:
    """Return each session's share of whole prompt blocks that an earlier prompt of it had."""
    known = np.add.reduceat(plan.kept_len // plan.block_tokens, plan.first[:-1])
    every = np.add.reduceat(plan.input_len // plan.block_tokens, plan.first[:-1])
    found: NDArray[np.float64] = known / np.maximum(1, every)
    return found


def _quartiles(*columns: Sequence[float]) -> Figures:
    names = ("turns", "prompt", "unseen", "answer", "reuse")
    return {
        name: np.quantile(np.asarray(values, float), QUARTILES)
        for name, values in zip(names, columns, strict=True)
    }


def halves(corpus: Corpus, splits: int) -> list[tuple[Figures, Figures]]:
    """Return relative differences from the half left out: of what was made, and of the other half."""
    found = []
    rng = np.random.default_rng(7)
    for seed in range(splits):
        order = rng.permutation(len(corpus.sessions))
        middle = len(order) // 2
        fitted, left_out = (
            Corpus(tuple(corpus.sessions[place] for place in part), corpus.block_tokens, corpus.scope)
            for part in (order[:middle], order[middle:])
        )
        truth, both = recorded(left_out), (made(fitted_model(fitted).generate(MADE, seed)), recorded(fitted))
        one, other = ({name: figures[name] / truth[name] - 1 for name in truth} for figures in both)
        found.append((one, other))
    return found


def differences(corpus: Corpus, splits: int) -> None:
    """Print the table of ``halves``, and what is made after the whole corpus beside that corpus."""
    whole = recorded(corpus)
    same = made(fitted_model(corpus).generate(MADE, 0))
    found, rows = halves(corpus, splits), []
    for name in whole:
        for index, quartile in enumerate(("P25", "P50", "P75")):
            errors, noise = np.abs([[side[name][index] for side in pair] for pair in found]).T
            figures = 100 * (same[name][index] / whole[name][index] - 1), np.median(errors), np.median(noise)
            shown = f"{figures[0]:+.1f}", *(f"{100 * figure:.1f}" for figure in figures[1:])
            rows.append([f"{name} {quartile}", *shown, f"{np.count_nonzero(errors <= NEAR)} of {splits}"])
    titles = "made after all (%)|made after one half (%)|the other half itself (%)|within 5 % of"
    caption = f"medians of |difference| over {splits} splits, {MADE:,} sessions made each time"
    print(table("quartile", titles, rows, caption=caption))


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(
        __doc__,
        given,
        corpus=(EXCERPT, "recorded sessions"),
        turns=(1_000_000, "of the plan"),
        splits=(20, "of the corpus"),
        plan_alone=(False, "make the plan in this process and end"),
    )
    if options.plan_alone:
        plan_alone(options.corpus, options.turns)
        return 0
    words = ["--plan-alone", "--corpus", str(options.corpus), "--turns", str(options.turns)]
    command = [sys.executable, "-m", "tools.perf_sessions", *words]
    if subprocess.run(command, check=False, timeout=DEADLINE_S).returncode:
        return 1
    corpus = load_corpus(options.corpus)
    if len(corpus.sessions) < FEWEST:
        print(f"{len(corpus.sessions)} sessions are too few for halves: give more with --corpus FILE")
    else:
        differences(corpus, options.splits)
    return 0


if __name__ == "__main__":
    sys.exit(main())
