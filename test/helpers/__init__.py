"""What tests share. Of the training core:

    features, worlds, laws      a kind of training (`Feature`), where it runs (`Place`), and that both agree (`check`);
                                a new ability is a line in `FEATURES`, with its loss over a whole batch for `by_torch`
    reference, twins            a small training (`training`), the equations of the rules, their float64 twin (`twin`)
    runs, loops, splitting      samplers, loops and loaders: which samples an update takes, whatever the model is
    arrivals, streams           batches that arrive, and streams, beside the plain loop over all rows
    processes, agreements       ranks that are processes (`run_job`) or threads with a store
    mistakes, properties        tables of errors, and the number of examples of a property

The fuzz draws its own trainings (`fuzz.case.Case`) against its own twin; only `fuzz.sums` draws a `Feature`.
"""
