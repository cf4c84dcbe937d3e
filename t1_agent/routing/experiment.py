"""Measure the train-versus-rollout difference of log-probs with routes replayed and not, and what R3 costs.

``python -m t1_agent.routing.experiment --out r3_mismatch.json`` needs no data: it uses a small MoE with random weights and the same one
trained briefly on synthetic text (random words that are then repeated), in about two minutes on one core. The tables of ``docs/r3.md`` are
its output.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from t1_agent.algo.mismatch import mismatch_metrics
from t1_agent.engines.hf import HFEngine
from t1_agent.models.precision import cast_parameters
from t1_agent.models.tiny_moe import build_actor, tiny_moe_config
from t1_agent.routing.metrics import compare_routes
from t1_agent.routing.record import RouteRecorder
from t1_agent.routing.replay import RoutingReplay
from t1_agent.types import Completion, IntArray, SamplingParams

VOCAB, STOP, PAD = 512, 1, 0
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SETTINGS = (("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32"))


def synthetic_text(rng: np.random.Generator, sequences: int, length: int) -> IntArray:
    """Sequences of random "words" from a skewed lexicon, each said a second time later: something to predict, something to copy.

    Args:
        rng: Random stream.
        sequences: Rows.
        length: Tokens a row.

    Returns:
        int32 [sequences, length], ids from 2 on.
    """
    lexicon = np.random.default_rng(0).integers(2, VOCAB, (64, 3))
    weights = 1.0 / np.arange(1, 65)
    picks = rng.choice(64, size=(sequences, length // 6 + 1), p=weights / weights.sum())
    said = lexicon[picks].reshape(sequences, -1)
    return np.concatenate([said, said], axis=1)[:, :length].astype(np.int32)


def briefly_trained(seed: int, steps: int) -> Any:
    """Train the small MoE for ``steps`` steps of 16 sequences of 64 tokens."""
    model = build_actor(tiny_moe_config(VOCAB, max_positions=256), seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = torch.from_numpy(synthetic_text(rng, 16, 64).astype(np.int64))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def recompute(trainer: Any, prompts: IntArray, completions: Sequence[Completion], *, replay: bool) -> dict[str, Any]:
    """Recompute the samples' log-probs in one right-padded batch, with the sampler's routes or without.

    Returns:
        Mismatch metrics, and the agreement of the trainer's live routes with the recorded ones.
    """
    start = prompts.shape[1]
    width = start + max(len(completion.token_ids) for completion in completions)
    shape = (len(completions), width)
    ids, mask = np.full(shape, PAD, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
    sampled, valid = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.bool_)
    first = completions[0].routes
    assert first is not None
    routes = np.zeros((*shape, *first.shape[1:]), dtype=first.dtype)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        stop = start + len(completion.token_ids)
        ids[row, :stop] = np.concatenate([prompt, completion.token_ids])
        mask[row, start:stop], sampled[row, start:stop] = True, completion.logprobs
        routes[row, : stop - 1], valid[row, : stop - 1] = completion.routes, True
    tensor = torch.from_numpy(ids)
    if replay:
        with torch.no_grad(), RoutingReplay(trainer, routes, valid, counted=valid) as replaying:
            logits = trainer(input_ids=tensor, use_cache=False).logits
        agreement = replaying.verify().agreement
    else:
        with torch.no_grad(), RouteRecorder(trainer) as recorder:
            logits = trainer(input_ids=tensor, use_cache=False).logits
        agreement = compare_routes(routes.reshape(-1, *first.shape[1:]), recorder.take(), valid.reshape(-1))
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, tensor[:, 1:, None])[..., 0].numpy()
    trained = np.concatenate([np.zeros((len(ids), 1), dtype=np.float32), logprobs], axis=1)
    return mismatch_metrics(trained, sampled, mask) | agreement.as_dict("")


def measure_mismatch(model: Any, name: str, seed: int, sequences: int) -> list[dict[str, Any]]:
    """All pairs of precisions, R3 off and on, from the same samples for each sampler."""
    prompts = synthetic_text(np.random.default_rng(1000 + seed), sequences, 12)
    results = []
    for sampler, trainer in _SETTINGS:
        engine = HFEngine(model, stop_token_ids=[STOP], pad_token_id=PAD, dtype=_DTYPES[sampler])
        completions = engine.generate(list(prompts), SamplingParams(max_tokens=96, seed=seed))
        learner = copy.deepcopy(model).eval()
        cast_parameters(learner, _DTYPES[trainer])
        for replay in (False, True):
            measured = recompute(learner, prompts, completions, replay=replay)
            results.append({"model": name, "seed": seed, "sampler": sampler, "trainer": trainer, "r3": replay, **measured})
    return results


def measure_overheads(model: Any, repeats: int) -> dict[str, float]:
    """CPU seconds (best of ``repeats``) of generation with recording off and on, and of a training step with replay off and on."""
    prompts = list(synthetic_text(np.random.default_rng(0), 64, 48))
    ids = torch.from_numpy(synthetic_text(np.random.default_rng(1), 8, 240).astype(np.int64))
    with torch.no_grad(), RouteRecorder(model) as recorder:
        model(input_ids=ids, use_cache=False)
    routes, valid = recorder.take(), np.ones(ids.numel(), dtype=np.bool_)
    engines = {on: HFEngine(model, stop_token_ids=[], pad_token_id=PAD, record_routes=on) for on in (False, True)}
    best: dict[str, float] = {}

    def clock(name: str, work: Any) -> None:
        started = time.process_time()
        work()
        best[name] = min(best.get(name, float("inf")), time.process_time() - started)

    def plain_step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    def replayed_step() -> None:
        with RoutingReplay(model, routes, valid) as replaying:
            plain_step()
        replaying.verify()

    for _ in range(repeats):
        for on, engine in engines.items():
            clock(f"generate_record_{on}", lambda engine=engine: engine.generate(prompts, SamplingParams(max_tokens=48, seed=0)))
        clock("step_replay_False", plain_step)
        clock("step_replay_True", replayed_step)
    return best | {
        "recording_overhead": best["generate_record_True"] / best["generate_record_False"] - 1,
        "replay_overhead": best["step_replay_True"] / best["step_replay_False"] - 1,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: means over seeds, with the smallest and largest seed for the headline figure."""
    lines = [
        "| model | sampler | trainer | R3 | mean abs dlogp (min to max over seeds) | p99 | max | k3 | share over ln 2 | otherwise |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((r["model"], r["sampler"], r["trainer"], r["r3"]) for r in results)
    for key in keys:
        runs = [r for r in results if (r["model"], r["sampler"], r["trainer"], r["r3"]) == key]
        headline = [r["mean_abs_delta_logp"] for r in runs]
        mean = {name: float(np.mean([r[name] for r in runs])) for name in runs[0] if isinstance(runs[0][name], float)}
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | {'on' if key[3] else 'off'} | {np.mean(headline):.2e} ({min(headline):.2e} to "
            f"{max(headline):.2e}) | {mean['p99_abs_delta_logp']:.2e} | {mean['max_abs_delta_logp']:.2e} | {mean['k3']:.1e} | "
            f"{mean['share_over_ln2']:.4f} | {mean['disagreement']:.4f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements and print the table."""
    parser = argparse.ArgumentParser(prog="python -m t1_agent.routing.experiment", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    parser.add_argument("--sequences", type=int, default=64, help="sequences sampled for each seed and setting (default 64)")
    parser.add_argument("--steps", type=int, default=300, help="training steps of the briefly trained model (default 300)")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each timing (default 5)")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file, which must not exist")
    options = parser.parse_args(arguments)
    if options.out is not None and options.out.exists():
        parser.error(f"--out {options.out} already exists; nothing is overwritten")
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        results += measure_mismatch(build_actor(tiny_moe_config(VOCAB, max_positions=256), seed), "random", seed, options.sequences)
        results += measure_mismatch(briefly_trained(seed, options.steps), f"trained {options.steps} steps", seed, options.sequences)
    results.sort(key=lambda result: result["model"])
    overheads = measure_overheads(build_actor(tiny_moe_config(VOCAB, max_positions=256), 0), options.repeats)
    sys.stdout.write(f"{table(results)}\n\n{json.dumps(overheads, indent=1)}\n")
    if options.out is not None:
        report = {"torch": torch.__version__, "options": {k: v for k, v in vars(options).items() if k != "out"}, "results": results}
        options.out.write_text(json.dumps(report | {"overheads": overheads}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
