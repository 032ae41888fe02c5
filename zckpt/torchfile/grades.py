"""How far a global that a pickle names may be trusted: data, a framework's class, anything else, or what runs code.

data        makes containers, numbers, tensors, and nothing else
known       a class that frameworks really put into checkpoints, and the program that needs it
dangerous   runs code, imports, loads, opens or sends something, or leads to what does
unknown     anything else

Of the standard library all is dangerous but what is listed as data or in a module that can do no harm: what is added to
it is, too. A name with dots, which leads from an object to another, is never data, and known only from class to class.
"""

from __future__ import annotations

import re
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # what Python 2 called modules, as Python 3 loads its pickles
from collections.abc import Iterable
from functools import lru_cache

from zckpt.state.dtypes import DTYPES
from zckpt.torchfile.rebuild import ALL_BUILDERS, MEMORY_FORMATS, MODULES

DATA, KNOWN, UNKNOWN, DANGEROUS = GRADES = ("data", "known", "unknown", "dangerous")
"""From the best to the worst."""

_DATA = {
    "builtins": "bool bytes bytearray complex dict float frozenset int list long object range set slice str tuple "
    "unicode xrange",
    "collections": "ChainMap Counter OrderedDict UserDict UserList defaultdict deque",
    "copyreg": "_reconstructor __newobj__ __newobj_ex__",
    "_codecs": "encode",
    "_io": "BytesIO",
    "io": "BytesIO",
    "argparse": "Namespace",
    "array": "_array_reconstructor array",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "pathlib._local": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "types": "NoneType SimpleNamespace",
    "typing": "Any",
    "uuid": "UUID",
    "numpy": "bool bool_ complex64 complex128 float16 float32 float64 int8 int16 int32 int64 ndarray str_ uint8 uint16 "
    "uint32 uint64 void",
    "torch": "Size Tensor UntypedStorage",
    "torch.storage": "TypedStorage UntypedStorage _TypedStorage _UntypedStorage",
    "torch.nn.parameter": "Buffer Parameter UninitializedBuffer UninitializedParameter",
}

DATA_GLOBALS = {(module, name) for module, names in _DATA.items() for name in names.split()} | ALL_BUILDERS.keys() | {
    ("torch", name) for name in [*DTYPES, *MEMORY_FORMATS, *(one.storage for one in DTYPES.values() if one.storage)]
}  # fmt: skip

_CLASSES = {
    "DeepSpeed": r"deepspeed\.(runtime\.(fp16|zero|config|config_utils|lr_schedules)(\.\w+)*|utils\.tensor_fragment"
    r"|moe\.\w+|checkpoint\.\w+)",
    "Megatron": r"megatron\.(core\.(dist_checkpointing|distributed|enums|optimizer|transformer|models|num_microbatches_"
    r"calculator|optimizer_param_scheduler|rerun_state_machine)(\.\w+)*|model\.enums|enums|fp16_deprecated\.loss_scaler"
    r"|training\.\w+|core\.\w*config\w*)",
    "torch.distributed.checkpoint": r"torch\.distributed\.checkpoint\.(metadata|planner|filesystem|storage|hf_storage"
    r"|_fsspec_filesystem|stateful)",
    "torch.distributed": r"torch\.distributed\.(_shard|tensor|_tensor|device_mesh|_mesh_layout|remote_device|fsdp"
    r"|_composable)(\.\w+)*",
    "torch": r"torch\.(nn\.(modules|utils\.parametri[sz]e|parallel)|optim|ao\.nn|(cuda\.)?amp\.grad_scaler"
    r"|utils\.data\.(sampler|distributed)|torch_version)(\.\w+)*",
    "transformers": r"transformers\.(training_args(_seq2seq)?|trainer_utils|trainer_pt_utils|trainer_callback"
    r"|debug_utils|integrations\.deepspeed|deepspeed|generation\.configuration_utils|configuration_utils|tokenization_utils_base"
    r"|modeling_outputs|models(\.\w+)+\.(configuration|modeling)_\w+|utils\.generic)",
    "Accelerate": r"accelerate\.(state|utils\.(dataclasses|fsdp_utils|deepspeed)|optimizer|scheduler)",
    "PEFT": r"peft\.(config|utils\.peft_types|tuners(\.\w+)+)",
    "sentence-transformers": r"sentence_transformers\.((\w+\.)?training_args|base\.sampler)",
    "LLaMA-Factory": r"llamafactory\.hparams\.training_args",
    "ms-swift": r"swift\.trainers\.arguments",
    "axolotl": r"axolotl\.core\.training_args(_base)?",
    "TRL": r"trl\.(trainer|experimental)(\.\w+)*_config",
    "Lightning": r"(lightning|pytorch_lightning|lightning_fabric)(\.\w+)*\.(parsing|callbacks|callbacks\.\w+|states"
    r"|utilities\.data|progress|loops\.\w+)",
    "OmegaConf": r"omegaconf\.(base|dictconfig|listconfig|nodes)",
    "OLMo-core": r"olmo_core\.distributed\.checkpoint\.\w+",
    "nanotron": r"nanotron\.(random|config|config\.\w+|parallel\.\w+|serialize\.metadata)",
    "torchao": r"torchao\.(optim|prototype\.low_bit_optim|dtypes|quantization|float8)(\.\w+)*",
    "bitsandbytes": r"bitsandbytes\.(functional|nn\.modules|optim\.\w+)",
    "Transformer Engine": r"transformer_engine\.common\.recipe(\.\w+)*",
    "Apex": r"apex\.(amp|fp16_utils)\.\w+",
    "fairseq": r"fairseq\.(data\.dictionary|dataclass\.\w+)",
    "tokenizers": r"tokenizers(\.\w+)?",
    "numpy": r"numpy\.random\.(_\w+|mtrand|bit_generator)",
}  # fmt: skip
"""The modules of which frameworks put classes into checkpoints, by program; their functions are none of them."""

_KNOWN = [(program, re.compile(pattern)) for program, pattern in _CLASSES.items()]

_CLASS = re.compile(r"_*[A-Z]\w*(\._*[A-Z]\w*)*")

_FUNCTIONS = {
    ("deepspeed.utils.tensor_fragment", "fragment_address"): "DeepSpeed",
    ("torch.distributed.remote_device", "_remote_device"): "torch.distributed",
    ("torch.amp.grad_scaler", "_refresh_per_optimizer_state"): "torch",
    ("torch.cuda.amp.grad_scaler", "_refresh_per_optimizer_state"): "torch",
    **{("numpy.random._pickle", f"__{name}_ctor"): "numpy" for name in ("randomstate", "generator", "bit_generator")},
    ("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence"): "numpy",
}
"""What is known and is not called as classes are."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


HARMLESS = _words("""
    abc array bisect calendar cmath collections datetime decimal enum errno fractions graphlib hashlib heapq html
    ipaddress itertools json keyword math numbers queue random re statistics string struct textwrap time token
    unicodedata weakref zoneinfo __future__
""")
"""Of the standard library: they compute."""

_GONE = _words("""
    __builtin__ __builtins__ _aix_support _interpreters _osx_support _pyrepl _xxsubinterpreters asynchat asyncore binhex
    cPickle cgi cgitb chunk commands crypt distutils dummy_threading formatter httplib idlelib imghdr imp lib2to3
    macpath mailcap msilib nis nntplib nt ossaudiodev parser pipes posix smtpd sndhdr spwd sunau symbol telnetlib test
    urllib2 uu winreg xdrlib
""")
"""Of the standard library of other versions and systems."""

STANDARD = (sys.stdlib_module_names | _GONE) - HARMLESS

_RUNS = _words("""
    accelerate.commands accelerate.launchers aiohttp billiard celery cffi cloudpickle conda datasets.load
    deepspeed.launcher deepspeed.ops.op_builder dill _distutils_hack execnet fabric fickling fsspec httpx
    huggingface_hub invoke IPython jinja2 joblib jsonpickle jupyter_client mako modelscan nose numexpr
    numpy.ctypeslib numpy.DataSource numpy.distutils numpy.f2py numpy.fromfile numpy.fromregex numpy.genfromtxt
    numpy.lib._npyio_impl numpy.lib.format numpy.lib.npyio numpy.loadtxt numpy.memmap numpy.save numpy.savetxt
    numpy.savez numpy.testing pandas.eval pandas.io paramiko pexpect picklescan pip pkg_resources plumbum psutil py
    pyspark.serializers _pytest pytest requests setuptools sh sympy.sympify tensorflow.io torch._appdirs
    torch._dynamo torch._export torch._inductor torch._lazy torch.classes torch.compile torch.distributed.elastic
    torch.distributed.launch torch.distributed.rpc torch.distributed.run torch.export torch.fx torch.hub torch.jit
    torch.multiprocessing torch.onnx torch.ops torch.package torch.save torch.serialization torch.testing
    torch.utils._config_module torch.utils.benchmark torch.utils.bottleneck torch.utils.collect_env
    torch.utils.cpp_extension torch.utils.data.datapipes torch.utils.file_baton torch.utils.model_dump
    torch.utils.tensorboard torchvision.io transformers.dynamic_module_utils transformers.pipelines
    transformers.utils.hub urllib3 wheel
""")
"""Packages, modules and names besides the standard library's that run, load or send what they are told to."""

_NAMES = _words("""
    Popen Unpickler _load_from_bytes check_call check_output compile eval exec execWrapper execfile execv execve getattr
    getattr_static getoutput import_module load load_config load_library load_model load_module load_source loads
    methodcaller attrgetter partial popen read_pickle resolve_name run_cmd run_command run_module run_path runcode
    runcommand runsource runstring spawn system unsafe_load
""")
"""What runs or loads something, whatever module it is of."""

_MODULES = _words("builtins ctypes importlib marshal nt os pickle posix pty runpy shutil socket subprocess sys")
"""Names of modules that are dangerous to name alone; any other one is called like some function."""


@lru_cache(maxsize=1 << 14)
def grade(module: str, name: str) -> tuple[str, str | None]:
    """Return the grade of a global, and which program needs it where that is known."""
    module, name = NAME_MAPPING.get((module, name), (MODULES.get(module, IMPORT_MAPPING.get(module, module)), name))
    if (module, name) in DATA_GLOBALS:
        return DATA, None
    parts, attributes = f"{module}.{name}".split("."), name.split(".")
    packages = {".".join(parts[:number]) for number in range(1, len(parts) + 1)}
    leads = STANDARD if len(attributes) > 1 else _MODULES
    if (
        (parts[0] in STANDARD and not (module == "builtins" and name.endswith(("Error", "Exception", "Warning"))))
        or not packages.isdisjoint(_RUNS)
        or not leads.isdisjoint(attributes)
        or not _NAMES.isdisjoint(attributes)
        or any(one[:2] == "__" == one[-2:] and one != "__main__" for one in parts)
    ):
        return DANGEROUS, None
    program = _FUNCTIONS.get((module, name))
    if program is None and _CLASS.fullmatch(name):
        program = next((program for program, known in _KNOWN if known.fullmatch(module)), None)
    return (UNKNOWN, None) if program is None else (KNOWN, program)


def worst(grades: Iterable[str]) -> str:
    """Return the worst of some grades; of none, data."""
    return max(grades, key=GRADES.index, default=DATA)
