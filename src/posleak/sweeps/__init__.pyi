from .sweep import Sweep as Sweep
