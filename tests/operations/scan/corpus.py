"""Published ways around scanners of pickles, each under the name of its advisory, report or paper.

GADGETS are globals that some scanner took for harmless. TRICKS are files that some scanner read otherwise than the
programs that load them, or not at all: each is made with a payload that leaves a file where it is run.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from tests.test_safety import called, named, shell, text

GADGETS = """
CVE-2025-1716 pip:main
CVE-2025-46417 ssl:get_server_certificate
CVE-2025-10157 asyncio.unix_events:_UnixSubprocessTransport._start
GHSA-q77w-mwjj-7mqx CVE-2025-71364 asyncio.unix_events:_UnixSubprocessTransport._start
GHSA-f7qq-56ww-84cr asyncio:create_subprocess_shell
GHSA-4r9r-ch6f-vxmx torch.utils.bottleneck.__main__:run_cprofile
GHSA-4whj-rm5r-c2v8 torch.utils.bottleneck.__main__:run_autograd_prof
GHSA-86cj-95qr-2p4f CVE-2025-71353 torch._dynamo.guards:GuardBuilder.get
GHSA-f4x7-rfwp-v3xw torch.fx.experimental.symbolic_shapes:ShapeEnv.evaluate_guards_expression
GHSA-f745-w6jp-hpxx torch.utils.collect_env:run
GHSA-jhph-76pp-mggw torch.utils.collect_env:run_and_read_all
GHSA-h3qp-7fh3-f8h4 torch.utils.data.datapipes.utils.decoder:basichandlers
GHSA-vr7h-p6mm-wpmh torch.jit.unsupported_tensor_ops:execWrapper
GHSA-vv6j-3g6g-2pvj torch.utils._config_module:ConfigModule.load_config
picklescan torch._inductor.codecache:compile_file
picklescan torch.serialization:load
picklescan torch:load
picklescan torch.hub:load
picklescan torch.hub:load_state_dict_from_url
fickling torch:compile
fickling torch.storage:_load_from_bytes
GHSA-5qwp-399c-mjwf CVE-2025-71349 trace:Trace.run
GHSA-g344-hcph-8vgg CVE-2025-71352 trace:Trace.runctx
GHSA-x696-vm39-cp64 CVE-2025-71374 profile:Profile.run
GHSA-6vqj-c2q5-j97w CVE-2025-71341 profile:Profile.runctx
GHSA-7wx9-6375-f5wh profile:run
GHSA-9w88-8rmg-7g2p CVE-2025-71378 cProfile:runctx
GHSA-49gj-c84q-6qm9 cProfile:run
GHSA-p523-jq9w-64x9 CVE-2026-22607 cProfile:run
CVE-2025-71351 timeit:timeit
GHSA-f54q-57x4-jg88 lib2to3.pgen2.grammar:Grammar.loads
GHSA-p9w7-82w4-7q8m lib2to3.pgen2.pgen:ParserGenerator.make_label
GHSA-3vg9-h568-4w9m CVE-2025-71354 idlelib.debugobj:ObjectTreeItem.SetText
GHSA-6w4w-5w54-rjvr CVE-2025-71358 idlelib.autocomplete:AutoComplete.get_entity
GHSA-7cq8-mj8x-j263 idlelib.autocomplete:AutoComplete.fetch_completions
GHSA-8r4j-24qv-fmq9 CVE-2025-71361 idlelib.calltip:Calltip.fetch_tip
GHSA-9xph-j2h6-g47v CVE-2025-71360 idlelib.calltip:get_entity
GHSA-m869-42cg-3xwr CVE-2025-71342 idlelib.run:Executive.runcode
GHSA-j343-8v2j-ff7w CVE-2025-71357 idlelib.pyshell:ModifiedInterpreter.runcommand
GHSA-3gf5-cxq9-w223 CVE-2025-71340 idlelib.pyshell:ModifiedInterpreter.runcode
GHSA-cj3c-v495-4xqh CVE-2025-71371 code:InteractiveInterpreter.runcode
huntr code:InteractiveInterpreter.runsource
huntr codeop:compile_command
GHSA-xp4f-hrf8-rxw7 ensurepip:_run_pip
GHSA-fqq6-7vqf-w3fg CVE-2025-71368 doctest:debug_script
GHSA-m273-6v24-x4m4 distutils.file_util:write_file
GHSA-4675-36f9-wf6r CVE-2025-71323 ctypes:CDLL
GHSA-4675-36f9-wf6r CVE-2025-71323 ctypes:WinDLL
GHSA-5hvc-6wx8-mvv4 CVE-2026-22608 ctypes.util:find_library
GHSA-84r2-jw7c-4r5q pydoc:locate
GHSA-5hvc-6wx8-mvv4 CVE-2026-22608 pydoc:pipepager
GHSA-vqmv-47xg-9wpr pty:spawn
GHSA-r7v6-mfhq-g3m2 CVE-2025-67748 pty:spawn
GHSA-565g-hwwr-4pp3 CVE-2025-67747 marshal:loads
GHSA-565g-hwwr-4pp3 CVE-2025-67747 types:FunctionType
picklescan types:CodeType
GHSA-wfq2-52f7-7qvj CVE-2026-22606 runpy:run_path
GHSA-wfq2-52f7-7qvj CVE-2026-22606 runpy:run_module
GHSA-q5qq-mvfm-j35x CVE-2026-22609 importlib:import_module
GHSA-q5qq-mvfm-j35x CVE-2026-22609 importlib.util:module_from_spec
GHSA-q5qq-mvfm-j35x CVE-2026-22609 code:interact
GHSA-q5qq-mvfm-j35x CVE-2026-22609 multiprocessing.util:spawnv_passfds
GHSA-h4rm-mm56-xf63 builtins:__import__
GHSA-h4rm-mm56-xf63 __builtin__:__import__
GHSA-r8g5-cgf2-4m4m numpy.f2py.crackfortran:getlincoef
GHSA-6556-fwc2-fg2p CVE-2025-71339 numpy.f2py.crackfortran:_eval_length
picklescan numpy.f2py.crackfortran:param_eval
CVE-2025-71355 numpy.testing._private.utils:runstring
modelscan-89 numpy:__builtins__
modelscan-89 numpy:core._internal.sys.modules
modelscan-89 numpy:prod.os.system
modelscan-89 builtins:dict.get
picklescan numpy:load
picklescan numpy.ctypeslib:load_library
picklescan pandas:read_pickle
picklescan pandas.io.pickle:read_pickle
picklescan joblib:load
GHSA-955r-x9j8-7rhh _operator:methodcaller
GHSA-46h3-79wf-xr6c CVE-2025-71367 _operator:attrgetter
picklescan _operator:itemgetter
picklescan operator:attrgetter
picklescan operator:methodcaller
huntr operator:itemgetter
huntr builtins:__dict__
huntr builtins:globals
huntr inspect:getattr_static
picklescan functools:partial
picklescan functools:reduce
picklescan _io:FileIO
huntr io:open
huntr codecs:open
huntr http.client:HTTPSConnection
picklescan urllib.request:urlopen
picklescan logging:FileHandler
picklescan logging.config:listen
picklescan logging.config:dictConfig
GHSA-vvpj-8cmc-gx39 pkgutil:resolve_name
picklescan cloudpickle.cloudpickle:_make_function
picklescan cloudpickle.cloudpickle:_builtin_type
picklescan cloudpickle.cloudpickle:subimport
GHSA-g38g-8gr9-h9xp CVE-2026-56315 uuid:_get_command_stdout
GHSA-5hwf-rc88-82xm uuid:_get_command_stdout
GHSA-g38g-8gr9-h9xp CVE-2026-56315 _osx_support:_read_output
GHSA-g38g-8gr9-h9xp CVE-2026-56315 _osx_support:_find_build_tool
GHSA-g38g-8gr9-h9xp CVE-2026-56315 _aix_support:_read_cmd_output
GHSA-g38g-8gr9-h9xp CVE-2026-56315 imaplib:IMAP4_stream
GHSA-g38g-8gr9-h9xp CVE-2026-56315 _pyrepl.pager:pipe_pager
GHSA-g38g-8gr9-h9xp CVE-2026-56315 _pyrepl.pager:tempfile_pager
GHSA-g38g-8gr9-h9xp CVE-2026-56315 test.support.script_helper:assert_python_ok
GHSA-mxhj-88fx-4pcv smtplib:SMTP
GHSA-5j3x-jp52-966f pathlib:os.system
GHSA-cffv-grgg-g429 CVE-2026-14535 ast:parse
GHSA-6ggj-6f2q-f7mx _interpreters:create
GHSA-6ggj-6f2q-f7mx _xxsubinterpreters:run_string
GHSA-m6fh-58r7-x697 CVE-2026-14534 _posixsubprocess:fork_exec
GHSA-m6fh-58r7-x697 CVE-2026-14534 site:execsitecustomize
GHSA-m6fh-58r7-x697 CVE-2026-14534 atexit:_run_exitfuncs
GHSA-m6fh-58r7-x697 CVE-2026-14534 atexit:register
fickling __future__:_ssl.RAND_bytes
huntr tarfile:open
huntr tarfile:TarFile.extractall
huntr zipimport:zipimporter
huntr dill._dill:loads
huntr dill:loads
modelscan-346 mailcap:findmatch
picklescan-29 bdb:Bdb.run
picklescan-29 pdb:run
picklescan-29 shutil:copyfile
picklescan-24 _pickle:loads
picklescan-24 cPickle:loads
picklescan-24 pickle:Unpickler
modelaudit-1027 builtins:exit
modelaudit-1027 faulthandler:_sigsegv
modelaudit-1027 resource:setrlimit
picklescan venv:create
picklescan webbrowser:open
picklescan commands:getoutput
picklescan httplib:HTTPSConnection
picklescan requests.api:get
picklescan aiohttp:ClientSession
picklescan nt:system
picklescan posix:system
picklescan os:system
picklescan os:execv
picklescan subprocess:Popen
picklescan sys:settrace
picklescan socket:create_connection
picklescan builtins:eval
picklescan builtins:exec
picklescan builtins:compile
picklescan builtins:getattr
picklescan builtins:open
picklescan builtins:breakpoint
picklescan __builtin__:apply
picklescan __builtin__:execfile
fickling imp:load_source
fickling zipfile:ZipFile.extractall
fickling sqlite3:connect
fickling shelve:open
fickling linecache:getlines
fickling fileinput:input
fickling compileall:compile_file
fickling py_compile:compile
fickling mmap:mmap
fickling syslog:syslog
fickling pipes:Template
fickling gc:get_objects
fickling unittest.mock:_importer
fickling ftplib:FTP
fickling poplib:POP3
fickling telnetlib:Telnet
fickling nntplib:NNTP
fickling socketserver:TCPServer
fickling xmlrpc.client:ServerProxy
fickling threading:Thread
fickling signal:raise_signal
fickling tempfile:mktemp
fickling glob:glob
fickling platform:popen
fickling numpy.distutils.exec_command:exec_command
fickling torch.distributed.elastic.multiprocessing:start_processes
fickling picklescan.scanner:scan_file_path
fickling fickling.hook:deactivate_safe_ml_environment
fickling modelscan.modelscan:ModelScan
own antigravity:fly
own this:s
own torch:os.system
own torch.nn.modules.linear:Linear.__init__.__globals__
own transformers.trainer_utils:os
own collections:OrderedDict.__class__
own transformers.training_args:TrainingArguments.__subclasses__
own torch.fx.graph_module:reduce_graph_module
own torch.package:PackageImporter
own torch.utils.cpp_extension:load_inline
own torch.utils.benchmark:Timer
own torch.ops:load_library
own torch.jit:CompilationUnit
own transformers.dynamic_module_utils:get_class_from_dynamic_module
own accelerate.launchers:notebook_launcher
own deepspeed.launcher.runner:main
own numexpr:evaluate
own sympy:sympify
own yaml:unsafe_load
own jsonpickle:loads
own copyreg:add_extension
own typing:get_type_hints
own dataclasses:make_dataclass
own argparse:FileType
own thread:start_new_thread
own SocketServer:TCPServer
own xmlrpclib:ServerProxy
own __builtin__:reduce
own os:getcwdu
own pathlib:Path.write_text
""".strip().splitlines()

OTHERS = [
    "evil:Class",
    "__main__:Model",
    "my_project.train:State",
    "transformers.trainer_utils:set_seed",
    "deepspeed.runtime.fp16.loss_scaler:to_python_float",
    "torch.nn.functional:gelu",
    "enum:Enum",
    "builtins:ValueError",
    "collections:namedtuple",
    "deepspeed_lookalike.runtime.fp16.loss_scaler:LossScaler",
    "xtorch.nn.modules.linear:Linear",
    "torch.nn.modulesx:Linear",
]
"""Nothing that is known to do harm, nor known at all."""

Files = dict[str, bytes]
Payload = Callable[[Path], bytes]


def system(sentinel: Path | str) -> bytes:
    return called(named("os:system"), shell(sentinel))


def archive(data: bytes, name: str = "x/data.pkl", **more: bytes) -> bytes:
    """What torch.save writes, around any pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, data)
        for key, value in {"x/version": b"3\n", "x/byteorder": b"little", **more}.items():
            file.writestr(key, value)
    return buffer.getvalue()


def twice(first: bytes, second: bytes) -> bytes:
    """An archive with two records of one name."""
    data = bytearray(archive(first, **{"y/data.pkl": second}))
    while (at := data.find(b"y/data.pkl")) >= 0:
        data[at] = ord("x")
    return bytes(data)


def patched(data: bytes, magic: bytes, at: int, new: bytes, which: int = 0) -> bytes:
    """An archive with other bytes in a header of one of its records."""
    found = -1
    for _ in range(which + 1):
        found = data.index(magic, found + 1)
    return data[: found + at] + new + data[found + at + len(new) :]


def legacy(payload: bytes) -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": 1}, buffer, _use_new_zipfile_serialization=False)
    parts, data = [], buffer.getvalue()
    stream = io.BytesIO(data)
    for _ in range(3):
        pickle.load(stream)
    parts.append(data[: stream.tell()])
    return b"".join([*parts, b"\x80\x02", payload, b".", pickle.dumps([], 2)])


def tar(root: bytes, storages: bytes = b"") -> bytes:
    zero = pickle.dumps(0, 2)
    members = {"storages": zero + (storages or pickle.dumps([], 2)), "tensors": zero, "pickle": root}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def old_tar(root: bytes) -> bytes:
    """Return a tar archive of before POSIX, without its magic."""
    data = bytearray(tar(root))
    for at in [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]:
        data[at + 257 : at + 345] = bytes(88)
        data[at + 148 : at + 156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


def zipped(data: bytes, name: str, method: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        file.writestr(name, data)
    return buffer.getvalue()


def npy(payload: bytes) -> bytes:
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + payload + b"."


def short(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def stacked(sentinel: Path, module: bytes, name: bytes) -> bytes:
    return b"\x80\x04" + module + name + b"\x93" + shell(sentinel) + b"\x85R."


def frames(sentinel: Path) -> bytes:
    """cpython issue 154848: the file is read on behind a frame that an opcode leaves."""
    hidden = b"cos\nsystem\n" + shell(sentinel) + b"\x85R("
    return (
        b"\x80\x05NV" + b"a" * (8192 * 16 - 17) + b"\n0(\x95" + struct.pack("<Q", 2)
        + b"B" + struct.pack("<I", 256 + 7) + b"\0\0" + hidden.ljust(256 + 5, b"N") + b"1."
    )  # fmt: skip


def bytes_of(data: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(data)) + data


PICKLES: dict[str, Payload] = {
    # one pickle, which Python's own `pickle.load` runs
    "protocol 0, INST": lambda s: b"(" + shell(s) + b"ios\nsystem\n.",
    "picklescan-13 INST": lambda s: b"\x80\x02(" + shell(s) + b"ios\nsystem\n.",
    "OBJ": lambda s: b"(" + named("os:system") + shell(s) + b"o.",
    "GHSA-mxhj-88fx-4pcv OBJ then POP": lambda s: b"\x80\x04(" + named("os:system") + shell(s) + b"o0N.",
    "call then POP": lambda s: system(s) + b"0N.",
    "call among SETITEMS": lambda s: b"}(" + text("a") + system(s) + b"u.",
    "nullifAI broken behind the payload": lambda s: system(s) + b"\xff\xff",
    "nullifAI ends behind the payload": system,
    "nullifAI breaks a line behind the payload": lambda s: b"\x80\x02" + system(s) + b"X\xff\xff\xff\x7f",
    "EOP stack underflow behind the payload": lambda s: system(s) + b"000.",
    "EOP memo that is missing": lambda s: system(s) + b"hZ.",
    "CVE-2025-71325 STACK_GLOBAL from the first byte": lambda s: short("os") + short("system") + b"\x93" + shell(s)
    + b"\x85R.",
    "picklescan-14 memo of BINPUT and MEMOIZE": lambda s: b"\x80\x04" + short("os") + b"q\0" + short("system")
    + b"q\x01" + short("torch._utils") + b"\x94" + short("_rebuild_tensor_v2") + b"\x94" + b"h\0h\x01\x93" + shell(s)
    + b"\x85R.",
    "huntr memo value: MEMOIZE behind BINGET": lambda s: b"\x80\x04" + short("os") + b"\x94h\0\x94" + short("system")
    + b"\x94h\x02\x940000h\x01h\x03\x93" + shell(s) + b"\x85R.",
    "huntr memo poisoned: POP before MEMOIZE": lambda s: b"\x80\x04" + short("os") + b"N0\x94" + short("system")
    + b"N0\x9400h\0h\x01\x93" + shell(s) + b"\x85R.",
    "huntr memo reused for another value": lambda s: b"\x80\x04" + short("collections") + b"q\0" + short("OrderedDict")
    + b"q\x01\x93" + short("os") + b"q\0" + short("system") + b"q\x0100h\0h\x01\x93" + shell(s) + b"\x85R.",
    "picklescan type confusion: DUP of names": lambda s: b"\x80\x04" + short("os") + b"2" + b"0" + short("system")
    + b"20\x93" + shell(s) + b"\x85R.",
    "names through a tuple and the memo as text": lambda s: b"\x80\x04Vos\np7\nVsystem\np8\n00g7\ng8\n\x93" + shell(s)
    + b"\x85R.",
    "names in BINUNICODE8": lambda s: stacked(s, b"\x8d" + struct.pack("<Q", 2) + b"os",
                                              b"\x8d" + struct.pack("<Q", 6) + b"system"),
    "names in UNICODE with escapes": lambda s: stacked(s, b"V\\u006fs\n", b"Vs\\u0079stem\n"),
    "names in STRING": lambda s: stacked(s, b"S'os'\n", b"S'sys\\x74em'\n"),
    "names in SHORT_BINSTRING": lambda s: stacked(s, b"U\x02os", b"U\x06system"),
    "dotted name": lambda s: stacked(s, short("pathlib"), short("os.system")),
    "dotted name of a module that imports os": lambda s: stacked(s, short("shutil"), short("os.system")),
    "huntr INT in another base": lambda s: b"I0x10\n0" + system(s) + b".",
    "huntr INT in octal": lambda s: b"I010\n0" + system(s) + b".",
    "huntr LONG in another base": lambda s: b"L0x10L\n0" + system(s) + b".",
    "LONG4 of 2000 bytes": lambda s: b"\x8b" + struct.pack("<I", 2000) + b"\x01" * 2000 + b"0" + system(s) + b".",
    "GLOBAL behind 100 kB of opcodes": lambda s: b"N0" * 50_000 + system(s) + b".",
    "GLOBAL behind 1 MB of opcodes": lambda s: b"N0" * 550_000 + system(s) + b".",
    "5000 other globals before": lambda s: b"".join(b"cos\npath\n0" for _ in range(5000)) + system(s) + b".",
    "5000 different globals before": lambda s: b"\x80\x04" + b"".join(
        text("os") + text(".".join(f"path.{'genericpath.' * (n >> bit & 1)}os" for bit in range(13)) + ".path")
        + b"\x930" for n in range(5000)
    ) + system(s) + b".",
    "INST that ends the file without a newline": lambda s: b"(" + shell(s) + b"ios\nsystem]",
    "BUILD of nothing": lambda s: b"NNb0" + system(s) + b".",
    "BUILD of an empty dict on a number": lambda s: b"K\x01}b0" + system(s) + b".",
    "SETITEMS of nothing in None": lambda s: b"N(u0" + system(s) + b".",
    "APPENDS of nothing to a tuple": lambda s: b")(e0" + system(s) + b".",
    "two states": lambda s: named("types:SimpleNamespace") + b")R}b}b0" + system(s) + b".",
    "several PROTO": lambda s: b"\x80\x02\x80\x04" + system(s) + b".",
    "PROTO in an odd place": lambda s: b"N0\x80\x02" + system(s) + b".",
    "objects left on the stack": lambda s: b"NNN(" + b"1" + system(s) + b".",
    "cpython-154848 frame": frames,
    "nested: pickle.loads of bytes": lambda s: called(named("pickle:loads"), bytes_of(system(s) + b".")) + b".",
    "nested in SHORT_BINBYTES of a loader that nobody knows": lambda s: called(
        named("_pickle:loads"), b"C" + bytes([len(system(s)) + 1]) + system(s) + b"."
    ) + b".",
    "getattr of an import": lambda s: called(
        called(named("builtins:getattr"), called(named("builtins:__import__"), text("os")), text("system")), shell(s)
    ) + b".",
    "getattr of a module that another one imports": lambda s: called(
        called(named("__builtin__:getattr"), named("shutil:os"), text("system")), shell(s)
    ) + b".",
    "NEWOBJ of map": lambda s: named("builtins:tuple") + b"(" + named("builtins:map") + b"(" + named("os:system")
    + shell(s) + b"\x85t\x81t\x81.",
    "NEWOBJ_EX": lambda s: b"\x80\x04" + named("builtins:tuple") + b"(" + named("builtins:map") + b"("
    + named("os:system") + shell(s) + b"\x85t}\x92t}\x92.",
    "BUILD with a __setstate__ of its own": lambda s: named("argparse:Namespace") + b")\x81}" + text("__setstate__")
    + named("os:system") + b"sb" + shell(s) + b"b.",
    "APPEND to what all of Python has": lambda s: named("sys:path") + text("/nowhere") + b"a0" + system(s) + b".",
    "modelscan-89 BUILD of a function's attributes": lambda s: named("collections:namedtuple") + b"N}" + text("leads")
    + named("shutil:os") + b"s\x86b0\x80\x04" + short("collections") + short("namedtuple.leads.system") + b"\x93"
    + shell(s) + b"\x85R.",
    "data before and behind": lambda s: pickle.dumps([{"a": 1}] * 3, 2)[:-1] + b"0" + system(s) + b".",
    "second pickle behind the first": lambda s: pickle.dumps({"a": 1}, 2) + system(s) + b".",
    "second pickle behind a first of no protocol": lambda s: b"N." + system(s) + b".",
}  # fmt: skip
"""`second pickle`: run by who loads twice, as torch does with legacy files."""


def compressed_record(payload: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", payload + b".")
        file.writestr("x/version", "3\n")
    return buffer.getvalue()


def concatenated(first: bytes, second: bytes) -> bytes:
    """Two archives; the directory of the second counts from the start of the file, as readers without mercy want it."""
    data = bytearray(first + second)
    end = data.rindex(b"PK\5\6")
    directory = struct.unpack_from("<L", data, end + 16)[0] + len(first)
    struct.pack_into("<L", data, end + 16, directory)
    at = directory
    while data[at : at + 4] == b"PK\1\2":
        name, extra, comment = struct.unpack_from("<3H", data, at + 28)
        struct.pack_into("<L", data, at + 42, struct.unpack_from("<L", data, at + 42)[0] + len(first))
        at += 46 + name + extra + comment
    return bytes(data)


HARMLESS = pickle.dumps({"a": 1}, 2)


def hidden_local(payload: bytes) -> bytes:
    """A record that the directory does not list, before those that it does."""
    hidden = archive(payload + b".")
    body = hidden[: hidden.index(b"PK\3\4", 4)]
    return concatenated(body, archive(HARMLESS, "y/data.pkl"))


ARCHIVES: dict[str, Callable[[bytes], Files]] = {
    # files around a payload; those with a name in .pt are run by torch.load, if they are run at all
    "plain pickle, CVE-2025-1889 no extension": lambda p: {"model": p + b"."},
    "CVE-2025-1889 another extension": lambda p: {"model.jpg": p + b"."},
    "CVE-2025-10155 pickle called .bin": lambda p: {"pytorch_model.bin": p + b"."},
    "pickle called .pt": lambda p: {"model.pt": p + b"."},
    "pickle called .safetensors": lambda p: {"model.safetensors": p + b"."},
    "pickle called .json": lambda p: {"config.json": p + b"."},
    "pickle called .distcp": lambda p: {"__0_0.distcp": p + b"."},
    "pickle called .metadata": lambda p: {".metadata": p + b"."},
    "pickle in a hidden directory": lambda p: {".cache/.x/y": p + b"."},
    "torch zip": lambda p: {"model.pt": archive(p + b".")},
    "torch zip called .txt": lambda p: {"notes.txt": archive(p + b".")},
    "huntr DATA.PKL": lambda p: {"model.pt": archive(p + b".", "x/DATA.PKL")},
    "extra pickle in a torch zip": lambda p: {"model.pt": archive(HARMLESS, **{"x/extra.pkl": p + b"."})},
    "extra pickle without an extension": lambda p: {"model.pt": archive(HARMLESS, **{"x/notes": p + b"."})},
    "pickle among the storages": lambda p: {"model.pt": archive(HARMLESS, **{"x/data/7": p + b"."})},
    "constants.pkl of TorchScript": lambda p: {"model.pt": archive(HARMLESS, **{"x/constants.pkl": p + b"."})},
    "huntr two data.pkl, payload first": lambda p: {"model.pt": twice(p + b".", HARMLESS)},
    "huntr two data.pkl, payload last": lambda p: {"model.pt": twice(HARMLESS, p + b".")},
    "CVE-2025-1944 names that disagree": lambda p: {
        "model.pt": patched(archive(p + b"."), b"PK\1\2", 46, b"y/data.pkl")
    },
    "CVE-2025-1944 local name that disagrees": lambda p: {
        "model.pt": patched(archive(p + b"."), b"PK\3\4", 30, b"y/data.pkl")
    },
    "CVE-2025-1945 flag bits in the local header": lambda p: {
        "model.pt": patched(archive(p + b"."), b"PK\3\4", 6, b"\x01\x00")
    },
    "CVE-2025-1945 flag bits in the directory": lambda p: {
        "model.pt": patched(archive(p + b"."), b"PK\1\2", 8, b"\x01\x00")
    },
    "CVE-2025-1945 flag of patched data": lambda p: {"model.pt": patched(archive(p + b"."), b"PK\1\2", 8, b"\x20\x00")},
    "CVE-2025-1945 flag of strong encryption": lambda p: {
        "model.pt": patched(archive(p + b"."), b"PK\1\2", 8, b"\x40\x00")
    },
    "CVE-2025-10156 checksum in the directory": lambda p: {
        "model.pt": patched(archive(p + b"."), b"PK\1\2", 16, b"\xde\xad\xbe\xef")
    },
    "CVE-2025-10156 checksum in the local header": lambda p: {
        "model.pt": patched(archive(p + b"."), b"PK\3\4", 14, b"\xde\xad\xbe\xef")
    },
    "method that disagrees": lambda p: {"model.pt": patched(archive(p + b"."), b"PK\3\4", 8, b"\x63\x00")},
    "size that disagrees": lambda p: {"model.pt": patched(archive(p + b"."), b"PK\1\2", 24, b"\x01\0\0\0")},
    "number of disks": lambda p: {"model.pt": patched(archive(p + b"."), b"PK\5\6", 4, b"\x07\x00")},
    "ZIP64 sizes in the directory without their field": lambda p: {
        "model.pt": patched(archive(p + b"."), b"PK\1\2", 20, b"\xff\xff\xff\xff\xff\xff\xff\xff")
    },
    "ZIP64 locator that points nowhere": lambda p: {
        "model.pt": archive(p + b".")[:-22] + struct.pack("<4sLQL", b"PK\6\7", 0, 1 << 40, 1) + archive(p + b".")[-22:]
    },
    "deflated torch zip": lambda p: {"model.pt": compressed_record(p)},
    "cut off in the directory": lambda p: {"model.pt": archive(p + b".")[:-30]},
    "end in the comment": lambda p: {
        "model.pt": archive(p + b".")[:-2] + struct.pack("<H", 22) + b"PK\5\6" + bytes(18)
    },
    "bytes before the archive": lambda p: {"model.pt": p + b"." + archive(HARMLESS)},
    "pickle before an archive that counts them": lambda p: {"model.pt": concatenated(p + b".", archive(HARMLESS))},
    "archive behind an archive": lambda p: {"model.pt": archive(p + b".") + archive(HARMLESS)},
    "archive before an archive that counts it": lambda p: {
        "model.pt": concatenated(archive(p + b"."), archive(HARMLESS))
    },
    "record that the directory does not list": lambda p: {"model.pt": hidden_local(p)},
    "zip in a zip": lambda p: {"all.zip": archive(archive(p + b"."), "inner/model.pt")},
    "zip in a deflated zip": lambda p: {"all.zip": compressed_record(archive(p + b".")[:-1])},
    "7z (nullifAI)": lambda p: {"model.pt": b"7z\xbc\xaf\x27\x1c\0\4" + p + b"."},
    "zstd": lambda p: {"model.pt": b"\x28\xb5\x2f\xfd" + p + b"."},
    "rar": lambda p: {"model.pt": b"Rar!\x1a\x07\x01\0" + p + b"."},
    "gzip (joblib)": lambda p: {"model.pkl": gzip.compress(p + b".")},
    "zlib (joblib)": lambda p: {"model.joblib": zlib.compress(p + b".")},
    "bz2 (joblib)": lambda p: {"model.joblib": bz2.compress(p + b".")},
    "xz (joblib)": lambda p: {"model.joblib": lzma.compress(p + b".")},
    "lzma (joblib)": lambda p: {"model.joblib": lzma.compress(p + b".", lzma.FORMAT_ALONE)},
    "zlib of any level (joblib)": lambda p: {
        f"{level}.joblib": zlib.compress((p if level == 3 else HARMLESS[:-1]) + b".", level) for level in range(10)
    },
    "lzma of a small dictionary (joblib)": lambda p: {
        "model.joblib": lzma.compress(
            p + b".", lzma.FORMAT_ALONE, filters=[{"id": lzma.FILTER_LZMA1, "dict_size": 4096}]
        )
    },
    "gzip of another checksum": lambda p: {"model.pkl": gzip.compress(p + b".")[:-8] + bytes(8)},
    "gzip that is damaged further on": lambda p: {
        "model.pkl": gzip.compress(p + b"." + bytes(999), 0)[:-99] + bytes(99)
    },
    "bz2 of another checksum": lambda p: {"model.pkl": bz2.compress(p + b".")[:-4] + bytes(4)},
    "xz of another checksum": lambda p: {"model.pkl": lzma.compress(p + b".")[:-36] + bytes(36)},
    "gzip behind gzip": lambda p: {"model.pkl": gzip.compress(b"") + bytes(9) + gzip.compress(p + b".")},
    "bz2 behind bz2": lambda p: {"model.pkl": bz2.compress(b"") + bz2.compress(p + b".")},
    "xz behind xz": lambda p: {"model.pkl": lzma.compress(p) + lzma.compress(b".")},
    "torch zip in gzip": lambda p: {"model.pt.gz": gzip.compress(archive(p + b"."))},
    "huntr legacy torch file": lambda p: {"model.pt": legacy(p)},
    "huntr tar torch file": lambda p: {"model.pt": tar(p + b".")},
    "tar torch file without magic": lambda p: {"model.pt": old_tar(p + b".")},
    "tar torch file, payload in its storages": lambda p: {"model.pt": tar(HARMLESS, b"\x80\x02" + p + b".")},
    "npy of objects": lambda p: {"model.npy": npy(p)},
    "huntr npy, INT in another base": lambda p: {"model.npy": npy(b"I0x10\n0" + p)},
    "npz of objects": lambda p: {"model.npz": archive(npy(p), "x.npy")},
    **{
        f"npz of objects, packed by method {method}": lambda p, method=method: {
            "model.npz": zipped(npy(p), "x.npy", method)
        }
        for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    },
    "torch zip in bytes of a pickle": lambda p: {
        "model.pt": archive(b"\x80\x03" + named("_io:BytesIO") + bytes_of(archive(p + b".")) + b"\x85R.")
    },
    "pickle in a tensor's bytes (Transformer Engine)": lambda p: {
        "model.pt": archive(HARMLESS, **{"x/data/0": b"\x80\x04" + p + b"."})
    },
    "pickle in bytes of protocol 2": lambda p: {
        "model.pt": archive(pickle.dumps({"extra": io.BytesIO(b"\x80\x04" + p + b".")}, 2))
    },
    "nested eight times": lambda p: {"model.pt": nested(p, 8)},
    "nested twenty times": lambda p: {"model.pt": nested(p, 20)},
}


def nested(payload: bytes, count: int) -> bytes:
    data = payload + b"."
    for _ in range(count):
        data = b"\x80\x03" + named("_io:BytesIO") + bytes_of(data) + b"\x85R."
    return data


EXTENSIONS: dict[str, bytes] = {
    "EXT1": b"\x80\x02\x82\x01.",
    "EXT2": b"\x80\x02\x83\x01\x02.",
    "EXT4": b"\x80\x02\x84\x01\x02\x03\x04.",
    "EXT1 without a protocol": b"\x82\x01.",
    "frame within a frame": b"\x80\x05\x95" + struct.pack("<Q", 20) + b"N0\x95" + struct.pack("<Q", 2) + b"N" * 8
    + b"0" * 7 + b".",
    "frame longer than its file": b"\x80\x04\x95" + struct.pack("<Q", 1 << 50) + b"N.",
    "opcode beyond its frame, and a tail": b"\x80\x05\x95" + struct.pack("<Q", 3) + b"\x8c\x14" + b"A" * 20 + b".tail",
    "opcode beyond its frame": b"\x80\x05\x95" + struct.pack("<Q", 3) + b"\x8c\x14" + b"A" * 20 + b".",
    "PROTO that is not the first": b"N0\x80\x04N.",
}  # fmt: skip
"""Nothing is named, and yet what is loaded is not what it seems."""
