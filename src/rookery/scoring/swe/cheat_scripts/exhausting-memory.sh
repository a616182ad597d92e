# uses up the memory of the sandbox for grading
# inside
first py 'x = []
try:
    while True: x.append(bytearray(1 << 24))
except MemoryError: pass
import os; os._exit(0)'
