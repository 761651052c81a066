"""The claims of each paper, one module for each: importing this package registers them.

position   where absolute position comes from (arXiv 2606.06160)
sinks      attention sinks as reference frames (arXiv 2508.02546)
wavelets   heads as filters of many resolutions (arXiv 2410.18067)

Every sentence of an abstract that says something about models has an entry, with a test; or with the reason why one
checkpoint cannot tell. The tests are ours, also where a measure is the authors'. Published numbers are named where they
help to read a result, and are no pass mark.
"""

from . import position, sinks, wavelets  # noqa: F401
