"""CPU seconds of a training run up to its first loss, by part, and of every program it compiles.

    python -m tests.training.start model=tiny steps=6 run_dir=DIR compile_cache=FOLDER

The arguments are those of train.py; a new FOLDER is a cold start. CPU seconds of all threads count, so another program
on the machine changes them less than wall time.
"""

import resource
import sys

PARTS = {
    "_choose_plan": "check, corpus, plan", "announce": "trace and compile the step", "begin": "initial state",
    "_train_from": "save of step 0",
}  # fmt: skip


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(arguments: list[str]) -> None:
    marks, programs = [("Python", cpu_seconds())], []

    def mark(name: str) -> None:
        marks.append((name, cpu_seconds()))

    import train
    from mstrain.training import prepare, session
    from mstrain.training.reporter import Reporter

    mark("imports")
    from jax._src import compiler

    compile_or_read, report = compiler.compile_or_get_cached, Reporter.step

    def timed(backend, module, *rest, **more):
        begin = cpu_seconds()
        result = compile_or_read(backend, module, *rest, **more)
        programs.append((cpu_seconds() - begin, str(module.operation.attributes["sym_name"]).strip('"')))
        return result

    def first_loss(self, step: int, metrics: dict) -> None:
        report(self, step, metrics)
        if step == 1:
            mark("first step")
            show(marks, programs)

    def marked(function, name: str, before: bool):
        def call(*arguments, **more):
            if before:
                mark(name)
            result = function(*arguments, **more)
            if not before:
                mark(name)
            return result

        return call

    compiler.compile_or_get_cached, Reporter.step = timed, first_loss
    for module, name in (
        (prepare, "_choose_plan"),
        *((session, name) for name in ("announce", "begin", "_train_from")),
    ):
        setattr(module, name, marked(getattr(module, name), PARTS[name], before=name == "_train_from"))
    train.run_command(train.COMMAND, arguments)


def show(marks: list[tuple[str, float]], programs: list[tuple[float, str]]) -> None:
    print("| part | CPU seconds |\n| --- | --- |")
    for (_, before), (name, after) in zip(marks, marks[1:]):
        print(f"| {name} | {after - before:.2f} |")
    print(f"| **first loss** | **{marks[-1][1]:.2f}** |")
    print("compiled or read:", ", ".join(f"{name} {seconds:.2f}" for seconds, name in sorted(programs, reverse=True)))


if __name__ == "__main__":
    main(sys.argv[1:])
