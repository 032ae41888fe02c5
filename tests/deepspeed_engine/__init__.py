"""The real DeepSpeed engine on CPU: makes checkpoints together with the truth about them, and resumes them.

    from tests.deepspeed_engine import SPECS, Spec, produce, resume, train

    folder = train(Spec("mine", stage=3, world_size=3), tmp_path)    # folder/global_step5, latest, truth.*
    verdict = resume(run_directory, SPECS["s2_bf16_dp4"].at(6), folder)

Needs deepspeed and safetensors. `train` and `produce` raise `tests.gloo.WorkerError` with the ranks' tracebacks.
"""

from tests.deepspeed_engine.catalogue import SPECS
from tests.deepspeed_engine.resume import Verdict, resume
from tests.deepspeed_engine.spec import Spec, ds_config
from tests.deepspeed_engine.training import produce, train

__all__ = ["SPECS", "Spec", "Verdict", "ds_config", "produce", "resume", "train"]
