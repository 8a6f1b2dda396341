"""What a run leaves: the trained model, the adapter alone, or the model with the adapter merged in."""

import json
from pathlib import Path

from zero_core.checkpoints.adapter_export import export_adapter
from zero_core.checkpoints.export import Exported, Parameters, export
from zero_core.engine import ZeroEngine
from zero_core.models.carry_over import carry_over
from zero_core.training.beating import BeatingResults
from zero_core.training.inputs import Inputs
from zero_core.training.journal import Journal
from zero_core.training.run import Run


def write_result(engine: ZeroEngine, inputs: Inputs, run: Run, journal: Journal) -> Exported | None:
    """Write ``run.export_dir``, replacing what is there. Collective; rank 0 alone gets the answer."""
    adapters = inputs.adapters

    def write_beside(directory: Path) -> None:
        carry_over(run.model_path, directory, run.train.chat_template)

    if adapters is None:
        results = BeatingResults(Parameters(), journal)
        return export(engine, run.export_dir, inputs.base, write_beside, results)

    def write_beside_adapter(directory: Path) -> None:
        carry_over(run.model_path, directory, run.train.chat_template, tokenizer_alone=True)
        adapters.write_config(directory, str(run.model_path))

    lora = run.train.lora
    if lora is None or not lora.merge:
        return export_adapter(engine, run.export_dir, adapters.stored_keys, write_beside_adapter)
    # Loads peft, which takes seconds.
    from zero_core.models.merging import MergedBase, MergedResults

    def write_beside_merged(directory: Path) -> None:
        write_beside(directory)
        if adapters.unties:
            _untie(directory / "config.json")

    merged = BeatingResults(MergedResults(engine, adapters), journal)
    return export(engine, run.export_dir, MergedBase(inputs.base, adapters), write_beside_merged, merged)


def _untie(path: Path) -> None:
    """The output layer has values of its own now."""
    config = json.loads(path.read_bytes())
    config["tie_word_embeddings"] = False
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
