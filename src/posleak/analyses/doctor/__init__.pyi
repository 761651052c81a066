from .doctor import Diagnosis as Diagnosis
