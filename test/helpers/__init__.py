"""What several tests share: slow twins, small trainings, and programs that tests start."""
