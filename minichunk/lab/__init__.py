"""The classroom: `from minichunk import lab` in a notebook. The engine never imports it.

Names are looked up when they are used: plotly and ipywidgets are imported by the first figure or widget.
"""

import importlib

_HOME = {
    "exercises": ["WrongAnswer", "broken", "check", "exercise", "solved"],
    "predictions": ["lock", "predict", "reveal", "score", "skip", "which_bug"],
    "scenes": "QUESTIONS document engine finish pieces rush_hour same_answers scrub_at step_sweep".split(),
    "scenes_blocks": [
        "ask",
        "compare_answers",
        "compare_waste",
        "engine_on",
        "engine_packing",
        "explore_blocks",
        "replay_blocks",
        "row_errors",
        "running_example",
        "thrown_out",
        "waste",
        "your_pool",
    ],
    "scenes_prompt": "answer_in_chunks chat_ids decode flips measure_lunch model_shape plain_model recorded_lunch roof split_times transformers_answer".split(),
    "scenes_tuning": ["measured", "pairs", "prompts_in_longest_gap", "recorded_run", "serve", "tuner", "waits"],
    "sliders": ["free_lunch", "split_prompt"],
    "ballot": ["other_claims", "verdict", "vote"],
    "controls": ["budget_selector", "steps_table"],
    "views": ["blame", "budget_latency", "culprit", "explain", "stalls", "step_strip", "timeline", "ttft_tbt"],
    "views_blocks": ["block_map", "packed_mask", "row_error_bars", "waste_by_policy"],
    "views_cost": ["chunk_plan", "chunk_time", "roofline", "tokens_fed"],
    "views_tuning": ["tuning_map"],
    "scrubber": ["scrub"],
    "packer_widget": ["packer"],
    "html": ["to_html"],
    "turns": ["gpu_turn", "noisy"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"minichunk.lab has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"minichunk.lab.{_MODULE_OF[name]}"), name)


def __dir__():
    return __all__
