"""Bytes that an instruction of a schedule reads from HBM and writes to it, each operand and result once."""

from mstrain.compiler.hlo import Instruction, Module, hbm_bytes_of_shape

SLICES = ("dynamic-slice", "slice", "gather")


def hbm_bytes(module: Module, computation: str, instruction: Instruction) -> float:
    """Bytes of operands and result in HBM; of an operand that is only cut from, and of a result that is updated in
    place, the part that is touched.
    """
    operands = [module.find(computation, name) for name in instruction.operands]
    whole = [hbm_bytes_of_shape(operand.shape) if operand else 0 for operand in operands]
    written = hbm_bytes_of_shape(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * whole[1]
    body = module.computations.get(instruction.called[0], ()) if instruction.opcode == "fusion" else (instruction,)
    if not body:
        return sum(whole) + written
    if instruction.opcode == "fusion":
        read = [_read(module, body, _parameter(body, n), size) for n, size in enumerate(whole)]
    else:
        read = [_read(module, body, name, size) for name, size in zip(instruction.operands, whole)]
    return sum(map(min, whole, read)) + min(written, _written(body))


def _parameter(body: tuple[Instruction, ...], number: int) -> str | None:
    return next((i.name for i in body if i.opcode == "parameter" and i.operands == (str(number),)), None)


def _read(module: Module, body: tuple[Instruction, ...], name: str | None, size: float) -> float:
    """Bytes read of a parameter of a body: those of its slices where nothing else uses it."""
    if name is None or body[-1].name == name:
        return size
    total = 0.0
    for user in body:
        if name not in user.operands:
            continue
        place = user.operands.index(name)
        if user.opcode in SLICES and place == 0:
            total += user.bytes
        elif user.opcode == "bitcast":
            total += _read(module, body, user.name, size)
        elif user.opcode == "fusion":
            inner = module.computations[user.called[0]]
            total += _read(module, inner, _parameter(inner, place), size)
        elif not (user.opcode == "dynamic-update-slice" and place == 0):
            return size
    return total


def _written(body: tuple[Instruction, ...]) -> float:
    """Bytes of the last instruction of a body, of an update in place the part that is new."""
    known = {i.name: i for i in body}
    roots = [known.get(name) for name in body[-1].operands] if body[-1].opcode == "tuple" else [body[-1]]
    total = 0.0
    for root in roots:
        update = root and root.opcode == "dynamic-update-slice" and known.get(root.operands[1])
        total += update.bytes if update else root.bytes if root else 0.0
    return total
