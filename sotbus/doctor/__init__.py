"""``sotbus doctor``: whether this box can do its job, judged by reading alone.

:mod:`.check` is the value, :mod:`.place` what is examined, :mod:`.checkup` the list of checks and the run over them;
the checks themselves are in one module a noun. :mod:`.probe` is a part that writes: it proves the lock with real
processes, on files of its own; :mod:`.peer` does the same with a run on another box (:mod:`.rendezvous`, :mod:`.pair`).
Every name, what it means and its remedy are in ``docs/doctor.md``.
"""
