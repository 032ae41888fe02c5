"""The real DeepSpeed engine on CPU: makes checkpoints together with the truth about them, and resumes them.

    from tests.engine import SPECS, Spec, produce, resume, train

    folder = train(Spec("mine", stage=3, world_size=3), tmp_path)    # folder/global_step5, latest, truth.*
    verdict = resume(run_directory, SPECS["s2_bf16_dp4"].at(6), folder)

Needs deepspeed and safetensors. `train` and `produce` raise `WorkerError` with the ranks' tracebacks.
"""

from tests.engine.catalogue import SPECS
from tests.engine.resume import Verdict, resume
from tests.engine.spec import Spec, ds_config
from tests.engine.training import produce, train
from tests.engine.workers import WorkerError, run

__all__ = ["SPECS", "Spec", "Verdict", "WorkerError", "ds_config", "produce", "resume", "run", "train"]
