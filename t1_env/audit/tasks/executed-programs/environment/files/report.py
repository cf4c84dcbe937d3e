total = sum([1, 2, 3])
print(totel)
