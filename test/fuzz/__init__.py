"""Random trainings with the package against a slow twin that is written from the laws alone."""
