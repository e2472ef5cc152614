"""CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER as data. No other file reads them.

The parser is stricter than CUDA: what CUDA silently cuts short or reads as another number is
refused, with the text and what CUDA would have made of it. The driver is asked as well, in a child
that is thrown away (a process keeps the mask with which it first called cuInit); the two must agree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..ipc.device import MIG, DeviceId, VisibleGpu, normalise_uuid
from ..ipc.errors import DevicePlanError
from .inventory import PROBE_TIMEOUT_S, HostGpu, Inventory, survey

Env = Mapping[str, str]

MASK, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
PCI_BUS_ID, FASTEST_FIRST = "PCI_BUS_ID", "FASTEST_FIRST"
_MPS = "CUDA_MPS_PIPE_DIRECTORY"
# Other vendors' masks nest and have rules of their own.
_OTHER_VENDORS = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

_INTEGER = re.compile(r"(0|[1-9][0-9]*)\Z")
_GPU = re.compile(r"GPU-[0-9A-Fa-f-]+\Z")
_MIG_OLD = re.compile(r"MIG-(GPU-[0-9A-Fa-f-]+)/([0-9]+)/([0-9]+)\Z")
_MIG_NEW = re.compile(r"MIG-[0-9A-Fa-f-]+\Z")
_LEADING_NUMBER = re.compile(r"\s*\+?([0-9]+)")  # what strtoul sees; measured: 0x1 is 0, 1.0 is 1

_MOST_GPUS = 1023  # a larger number is no index: most likely a UUID that lost its GPU-


@dataclass(frozen=True)
class Visibility:
    """The GPUs that one process sees, in its own order: entry N is its `cuda:N`."""

    gpus: tuple[VisibleGpu, ...]
    inventory: Inventory
    mask: str | None
    ordered: bool = True  # False: unlike GPUs under CUDA's own order, and no driver was asked

    def __str__(self) -> str:
        mask = f"{MASK} unset" if self.mask is None else f"{MASK}={self.mask}"
        return f"{len(self.gpus)} visible GPU{'' if len(self.gpus) == 1 else 's'}, {mask}"

    def listing(self) -> str:
        return ", ".join(f"cuda:{gpu.ordinal} = {gpu.uuid}" for gpu in self.gpus)

    def at(self, ordinal: int) -> VisibleGpu:
        """This process's `cuda:ordinal`. DevicePlanError when there is none."""
        if not self.ordered:
            raise _ambiguous_order(f"cuda:{ordinal}")
        if not 0 <= ordinal < len(self.gpus):
            raise DevicePlanError(
                f"there is no cuda:{ordinal} in this process: it has {self}: {self.listing()}"
            )
        return self.gpus[ordinal]

    def find(self, text: str) -> VisibleGpu:
        """The visible GPU with this UUID or unique prefix. DevicePlanError."""
        uuid = self.inventory.complete(text, f"device {text!r}")
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise DevicePlanError(
            f"{uuid} is not visible to this process ({self}): {self.listing()}. Add it to {MASK}"
        )

    def ordinal(self, uuid: str) -> int | None:
        """What this process calls that GPU, None when it does not see it or cannot count."""
        known = (gpu.ordinal for gpu in self.gpus if gpu.uuid == uuid)
        return next(known, None) if self.ordered else None


def look(env: Env | None = None, inventory: Inventory | None = None) -> Visibility:
    """What a process with environment `env` (this one's by default) sees. DevicePlanError.

    Without an inventory this machine's driver is asked.
    """
    env = os.environ if env is None else env
    if inventory is None:
        _entries(env)  # a mask that nobody can read is refused before any process is started
        inventory = probe(env)
    return resolve(env, inventory)


_asked: dict[frozenset[tuple[str, str]], Inventory] = {}


def probe(env: Env | None = None, timeout_s: float = PROBE_TIMEOUT_S) -> Inventory:
    """This machine's GPUs, and what its driver shows a process with `env`. DevicePlanError.

    Kept for the process; the whole environment is the key, because libcuda itself is found through it.
    """
    env = dict(os.environ if env is None else env)
    key = frozenset(env.items())
    if key not in _asked:
        unmasked = {name: value for name, value in env.items() if name != MASK}
        _asked[key] = survey(env, {**unmasked, ORDER: PCI_BUS_ID}, unmasked, timeout_s)
    return _asked[key]


def resolve(env: Env, inventory: Inventory) -> Visibility:
    """Pure: mask and order of `env` against an inventory. DevicePlanError."""
    entries = _entries(env)
    order = device_order(env)
    numbered = _numbered(inventory, order)
    needs_order = entries is None or any(_INTEGER.match(entry) for entry in entries)
    if numbered is None and needs_order:
        return _unnumbered(env, inventory, entries)
    found: list[VisibleGpu] = []
    if entries is None:
        uuids = [_only_instance(gpu) for gpu in numbered or ()]
    else:
        _refuse_cut_short(env[MASK], entries, numbered or inventory.gpus)
        uuids = [_named(entry, numbered or (), inventory, env[MASK]) for entry in entries]
    for ordinal, uuid in enumerate(uuids):
        found.append(inventory.described(ordinal, uuid))
    if len(set(uuids)) != len(uuids):
        raise DevicePlanError(
            f"{_shown(env)} names one GPU twice ({', '.join(uuids)}); CUDA would then show none at "
            "all (cuInit 101). Name each GPU once"
        )
    if inventory.driver is not None and tuple(uuids) != inventory.driver:
        answer = ", ".join(inventory.driver) or f"none: {inventory.why_none}"
        raise DevicePlanError(
            f"{_shown(env)} reads as {', '.join(uuids) or 'no GPU'}, but the driver shows this "
            f"process {answer}. Neither is taken on trust: write "
            f"full UUIDs into {MASK} (nvidia-smi -L prints them)"
        )
    if not found:
        raise DevicePlanError("the driver shows this process no GPU")
    return Visibility(tuple(found), inventory, env.get(MASK))


def under_mask(text: str, env: Env, inventory: Inventory) -> Visibility:
    """Pure: what a process with `env` would see if its mask were `text`. DevicePlanError."""
    return resolve({**env, MASK: text}, replace(inventory, driver=None))


def device_order(env: Env) -> str:
    """CUDA_DEVICE_ORDER, CUDA's default when unset. DevicePlanError for any other word."""
    order = env.get(ORDER, FASTEST_FIRST)
    if order not in (PCI_BUS_ID, FASTEST_FIRST):
        raise DevicePlanError(
            f"{ORDER}={order!r} is no order: CUDA would show no GPU at all (cuInit 101). Write "
            f"{ORDER}={PCI_BUS_ID}"
        )
    return order


def worker_variables(
    device: DeviceId, host_index: int | None, *, uuid_tokens: bool = True, graphics: bool = False
) -> dict[str, str]:
    """Mask and order of a worker that must see exactly this device. DevicePlanError.

    `uuid_tokens=False` is for simulators whose runtime cannot read a UUID (torch 1.13 counts no
    GPU then): they get the host index, which means that GPU only together with PCI order.
    """
    if device.kind == MIG and graphics:
        raise DevicePlanError(
            f"this worker needs graphics, which {device.uuid} cannot do: MIG instances have no "
            "graphics APIs. Turn rendering off or plan a whole GPU"
        )
    token = device.uuid
    if not uuid_tokens and device.uuid:
        if host_index is None:
            raise DevicePlanError(
                f"this simulator cannot read UUIDs in {MASK}, and no integer names {device.uuid}"
            )
        token = str(host_index)
    return {MASK: token, ORDER: PCI_BUS_ID}


def meaning(env: Env, inventory: Inventory | None = None) -> str:
    """The inherited mask in one sentence, for people. Never raises for what a mask says."""
    try:
        seen = look(env, inventory)
    except DevicePlanError as error:
        return error.message
    return f"{seen}: {seen.listing()}"


# -- reading the mask ------------------------------------------------------------------------------


def _shown(env: Env) -> str:
    return f"{MASK}={env[MASK]!r}" if MASK in env else f"{MASK} (unset)"


def _entries(env: Env) -> tuple[str, ...] | None:
    """The mask's entries without blanks, each well formed; None when unset. DevicePlanError."""
    text = env.get(MASK)
    if text is None:
        for name in _OTHER_VENDORS:
            if name in env:  # beside a CUDA mask they mean nothing: SLURM may set all three
                raise DevicePlanError(
                    f"{name}={env[name]!r} is set and {MASK} is not: this is an AMD platform, "
                    f"which is not supported. On an NVIDIA machine unset {name}"
                )
        device_order(env)
        return None
    _refuse_hidden(text)
    device_order(env)
    entries = tuple(entry.strip() for entry in text.split(","))
    for entry in entries:
        if not any(rule.match(entry) for rule in (_INTEGER, _GPU, _MIG_OLD, _MIG_NEW)):
            seen = "an empty entry" if not entry else f"{entry!r}"
            raise DevicePlanError(
                f"{_shown(env)}: {seen} is no entry. CUDA would {_cuda_reads(text)}. Write host "
                "indices (0,1), full UUIDs or unique prefixes (GPU-...), or MIG-<uuid>"
            )
    if len({_INTEGER.match(entry) is None for entry in entries}) > 1:
        raise DevicePlanError(
            f"{_shown(env)} mixes integers and UUIDs: CUDA would keep the kind of the first entry "
            "and stop, without an error, at the first of the other kind. Write UUIDs only"
        )
    if len(set(entries)) != len(entries):
        raise DevicePlanError(
            f"{_shown(env)} names one GPU twice: CUDA would show none at all (cuInit 101)"
        )
    if _MPS in env and _INTEGER.match(entries[0]):
        raise DevicePlanError(
            f"{_shown(env)} under MPS ({_MPS} is set): an integer counts in the list of the MPS "
            "server, which this process does not know. Write UUIDs (nvidia-smi -L prints them)"
        )
    return entries


def _refuse_hidden(text: str) -> None:
    """The masks that say "no GPU" on purpose, each with who usually writes it."""
    bare = text.strip()
    if bare not in ("", "-1", "NoDevFiles"):
        return
    who = {
        "": f"{MASK} is set and empty, which hides every GPU from this process (Ray writes that for"
        " num_gpus=0). Ask the launcher for a GPU, or unset the variable to see all",
        "-1": f"{MASK}=-1 hides every GPU from this process. Unset it to see all",
        "NoDevFiles": f"{MASK}=NoDevFiles: the scheduler granted this job no GPU. Ask for one",
    }
    raise DevicePlanError(who[bare] + ', or plan device="cpu"')


def _cuda_reads(text: str) -> str:
    """What CUDA would do with a malformed list, from the measured table, in words."""
    if text.lstrip()[:4] in ("GPU-", "MIG-"):
        return "stop there without an error and hide the entry and all after it"
    numbers: list[str] = []
    for entry in text.split(","):
        number = _LEADING_NUMBER.match(entry)
        if number is None or int(number[1]) > _MOST_GPUS:
            break
        numbers.append(str(int(number[1])))
    if not numbers:
        return "show no GPU at all (cuInit 100)"
    if len(set(numbers)) != len(numbers):
        return "show no GPU at all (cuInit 101: one GPU twice)"
    return f"read it as {','.join(numbers)} alone, without an error"


def _refuse_cut_short(text: str, entries: Sequence[str], numbered: Sequence[HostGpu]) -> None:
    for position, entry in enumerate(entries):
        if _INTEGER.match(entry) and int(entry) >= len(numbered):
            rest = ",".join(entries[:position])
            kept = f"show {rest} alone" if rest else "show no GPU at all (cuInit 100)"
            raise DevicePlanError(
                f"{MASK}={text!r}: this host has {len(numbered)} GPU(s), so there is no {entry}. "
                f"CUDA would end the list there and {kept}, without an error"
            )


# -- against an inventory --------------------------------------------------------------------------


def _numbered(inventory: Inventory, order: str) -> tuple[HostGpu, ...] | None:
    """The GPUs as CUDA numbers them, None when nobody knows: unlike cards, fastest first."""
    if order == PCI_BUS_ID:
        return inventory.gpus
    if inventory.cuda_order:
        place = {uuid: i for i, uuid in enumerate(inventory.cuda_order)}
        return tuple(sorted(inventory.gpus, key=lambda gpu: place.get(gpu.usable, len(place))))
    alike = len({gpu.name for gpu in inventory.gpus}) <= 1
    return inventory.gpus if alike else None


def _unnumbered(env: Env, inventory: Inventory, entries: Sequence[str] | None) -> Visibility:
    """Unlike GPUs in an order that only the driver knows: its answer is all there is."""
    known = [uuid for uuid in inventory.driver or () if inventory.matches(uuid)]
    wanted = len(inventory.gpus if entries is None else entries)
    if inventory.driver is not None and len(known) == wanted == len(inventory.driver):
        gpus = (inventory.described(i, uuid) for i, uuid in enumerate(known))
        return Visibility(tuple(gpus), inventory, env.get(MASK))
    if entries is not None:
        raise _ambiguous_order(_shown(env))
    gpus = (inventory.described(i, _only_instance(gpu)) for i, gpu in enumerate(inventory.gpus))
    return Visibility(tuple(gpus), inventory, None, ordered=False)


def _ambiguous_order(what: str) -> DevicePlanError:
    return DevicePlanError(
        f"{what}: this host has unlike GPUs, {ORDER} is not {PCI_BUS_ID}, and no driver was asked "
        f"which of them CUDA counts first. Set {ORDER}={PCI_BUS_ID} or write a UUID"
    )


def _only_instance(gpu: HostGpu) -> str:
    if len(gpu.instances) > 1:
        raise _unspecified_instance(f"{MASK} (unset)", gpu)
    return gpu.usable


def _unspecified_instance(what: str, gpu: HostGpu) -> DevicePlanError:
    names = ", ".join(instance.uuid for instance in gpu.instances)
    return DevicePlanError(
        f"{what} means a GPU in MIG mode, of which CUDA would take any free instance. Name one in "
        f"{MASK}: {names}"
    )


def _named(entry: str, numbered: Sequence[HostGpu], inventory: Inventory, text: str) -> str:
    """The canonical UUID that one entry means. DevicePlanError."""
    what = f"{MASK}={text!r}: entry {entry}"
    if _INTEGER.match(entry):
        gpu = numbered[int(entry)]
        if gpu.instances:
            raise _unspecified_instance(what, gpu)
        return gpu.uuid
    old = _MIG_OLD.match(entry)
    if old:
        parent = inventory.complete(old[1], what)
        for gpu in inventory.gpus:
            for one in gpu.instances:
                if gpu.uuid == parent and (one.gi, one.ci) == (int(old[2]), int(old[3])):
                    return one.uuid
        raise DevicePlanError(f"{what} is no instance of {parent}. Write MIG-<uuid>")
    if entry.startswith("MIG-") and not inventory.matches(entry):
        # A driver lists one instance of a GPU only, so that an unlisted one is not a wrong one.
        try:
            return normalise_uuid(entry, MIG)
        except ValueError as error:
            raise DevicePlanError(f"{what}: {error}. Write the whole MIG-<uuid>") from None
    uuid = inventory.complete(entry, what)
    for gpu in inventory.gpus:
        if gpu.uuid == uuid and gpu.instances:
            raise _unspecified_instance(what, gpu)
    return uuid
