from kernels.reference import recurrence as recurrent
