"""From one checkpoint, which candidate trains best, and up to which batch size? Short trainings on the same samples."""
