from . import cluster as cluster
from . import evaluation as evaluation
from . import simulation as simulation
