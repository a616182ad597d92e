# takes all memory of the box that it is graded in
# inside
first py 'x = []
try:
    while True: x.append(bytearray(1 << 24))
except MemoryError: pass
import os; os._exit(0)'
