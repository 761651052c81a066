"""The claims of each paper, one module per paper. Importing this package registers them.

position   where absolute position comes from (arXiv 2606.06160)
sinks      attention sinks as reference frames (arXiv 2508.02546)
wavelets   heads as filters of many resolutions (arXiv 2410.18067)
posleak    claims of posleak itself, about heads and directions; they belong to no paper

Every statement of an abstract about models has an entry, with a test or with the reason why one checkpoint cannot
decide it. The tests are our own, even where a measure is the authors'. Published values are quoted for orientation and
are not pass marks.
"""

from . import position, posleak, sinks, wavelets  # noqa: F401
